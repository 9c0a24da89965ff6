"""Which tokens two tokenizers have in common: the same bytes, however each of them spells a leading space.

Owns: reading tokens as bytes, and pairing ids. Must not know: models. Source: token-level intersection of Timor et al. 2502.05202.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.config.checkpoints import token_ids
from specdec.errors import ConfigError
from specdec.logging import get_logger
from specdec.models.source import read_json

logger = get_logger(__name__)

SMALL_OVERLAP = 100  # tokens; fewer hardly ever draft anything
_SPACE = "\u2581"  # sentencepiece's


@dataclass(frozen=True, slots=True)
class VocabularyOverlap:
    """draft_ids and target_ids: the same tokens, by ascending target id. fallback: the draft's id for every token it does not have."""

    draft_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    fallback: int


def overlap_of(
    draft: Path, target: Path, *, draft_eos: Sequence[int], target_eos: Sequence[int], sizes: tuple[int, int]
) -> VocabularyOverlap:
    """Pair the tokens of two tokenizer directories. sizes: rows of the draft's and of the target's embedding.

    The ends of a text are one token to both, whatever they are called.

    Raises:
        ConfigError: the two have no token in common, or the draft has nothing to stand for a token that it lacks.
    """
    theirs, ours = readable_tokens(draft), readable_tokens(target)
    pairs = {ours[text]: theirs[text] for text in ours.keys() & theirs.keys() if theirs[text] < sizes[0] and ours[text] < sizes[1]}
    if not pairs:
        raise ConfigError(
            "speculative_config.use_heterogeneous_vocab is true, but draft and target have no token in common",
            hint="choose a draft of the target's language and script",
        )
    if draft_eos and target_eos:
        pairs |= {end: draft_eos[0] for end in target_eos if end not in pairs}
    logger.info("draft and target share %d tokens: %.0f%% of the target's", len(pairs), 100 * len(pairs) / sizes[1])
    if len(pairs) < SMALL_OVERLAP:
        logger.warning("draft and target share %d tokens only: few drafts will be accepted", len(pairs))
    target_ids = tuple(sorted(pairs))
    return VocabularyOverlap(tuple(pairs[token] for token in target_ids), target_ids, _fallback(draft, draft_eos))


def readable_tokens(tokenizer: Path) -> dict[bytes, int]:
    """Return bytes -> id; of several ids with the same bytes the first. Special tokens stand for themselves, marked as such."""
    content = _tokenizer_json(tokenizer)
    special = {entry["id"] for entry in content.get("added_tokens") or () if entry.get("special")}
    added = {entry["id"] for entry in content.get("added_tokens") or ()}
    is_byte_level = "ByteLevel" in json.dumps([content.get("decoder"), content.get("pre_tokenizer")])
    found: dict[bytes, int] = {}
    for token, index in sorted(token_ids(tokenizer).items(), key=lambda item: item[1]):
        if index in special:
            text = b"\xff" + token.encode()  # 0xff is in no UTF-8 text, so no ordinary token looks like this
        else:
            text = token.encode() if index in added else _as_bytes(token, is_byte_level=is_byte_level)
        found.setdefault(text, index)
    return found


def _as_bytes(token: str, *, is_byte_level: bool) -> bytes:
    if is_byte_level and all(char in _BYTES for char in token):
        return bytes(_BYTES[char] for char in token)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(_SPACE, " ").encode()


def _fallback(draft: Path, draft_eos: Sequence[int]) -> int:
    model = _tokenizer_json(draft).get("model") or {}
    unknown = token_ids(draft).get(str(model.get("unk_token")))
    if unknown is None and isinstance(model.get("unk_id"), int):
        unknown = int(model["unk_id"])
    if unknown is not None:
        return unknown
    if not draft_eos:
        raise ConfigError(
            "the draft's tokenizer has neither an unknown token nor an end of text to stand for tokens it lacks",
            hint="choose a draft whose config.json names eos_token_id",
        )
    return draft_eos[0]


def _tokenizer_json(tokenizer: Path) -> Mapping[str, Any]:
    path = tokenizer / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"speculative_config.use_heterogeneous_vocab is true, but {tokenizer} has no tokenizer.json to compare",
            hint="save the tokenizer with transformers, which writes one",
        )
    return read_json(path)


def _byte_table() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes with: printable ones stand for themselves, the others are moved up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(moved)}


_BYTES = _byte_table()
