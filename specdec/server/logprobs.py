"""Log-probabilities as OpenAI's two routes and vLLM's prompt_logprobs print them.

Owns: token texts on the wire and the three shapes. Must not know: requests or streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.engine.tokenizer import Tokenizer
from specdec.scheduler.output import TokenLogprobs

LOWEST = -9999.0  # JSON has no infinity


class TokenTexts:
    """Texts and bytes of single tokens, each decoded once: an event may print twenty alternatives for each of its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes, str]] = {}  # bounded by the vocabulary

    def text(self, token_id: int) -> str:
        """Return the token as text, U+FFFD for bytes that are no whole character."""
        return self._look_up(token_id)[0]

    def raw(self, token_id: int) -> bytes:
        """Return the bytes the token stands for."""
        return self._look_up(token_id)[1]

    def name(self, token_id: int) -> str:
        """Return the text; the bytes spelled out where they are no whole character, because those would collide as keys."""
        return self._look_up(token_id)[2]

    def _look_up(self, token_id: int) -> tuple[str, bytes, str]:
        if token_id not in self._known:
            text, raw = self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id)
            self._known[token_id] = (text, raw, _name(text, raw))
        return self._known[token_id]


def completion_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], *, tokens: TokenTexts, text_offset: int
) -> tuple[dict[str, Any], int]:
    """Return the object of /v1/completions and the offset after it.

    Args:
        entries: one per token id; None where there is no probability (the first token of a prompt).
        text_offset: characters of text before the first token.
    """
    names = [tokens.name(token_id) for token_id in token_ids]
    offsets = []
    for token_id in token_ids:
        offsets.append(text_offset)
        text_offset += len(tokens.text(token_id))
    shown = {
        "tokens": names,
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _top_by_name(entry, tokens) for entry in entries],
        "text_offset": offsets,
    }
    return shown, text_offset


def chat_logprobs(entries: Sequence[TokenLogprobs], *, tokens: TokenTexts) -> dict[str, Any]:
    """Return the object of /v1/chat/completions."""
    return {"content": [_chat_entry(entry, tokens) for entry in entries], "refusal": None}


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], *, tokens: TokenTexts) -> list[dict[str, Any] | None]:
    """Return vLLM's prompt_logprobs: per token, id -> {logprob, rank, decoded_token} for itself and the top alternatives."""
    return [None if entry is None else _ranked(entry, tokens) for entry in entries]


def _chat_entry(entry: TokenLogprobs, tokens: TokenTexts) -> dict[str, Any]:
    top = [_chat_token(token_id, logprob, tokens) for token_id, logprob in entry.top]
    return _chat_token(entry.token_id, entry.logprob, tokens) | {"top_logprobs": top}


def _chat_token(token_id: int, logprob: float, tokens: TokenTexts) -> dict[str, Any]:
    return {"token": tokens.text(token_id), "logprob": _finite(logprob), "bytes": list(tokens.raw(token_id))}


def _top_by_name(entry: TokenLogprobs, tokens: TokenTexts) -> dict[str, float]:
    """The sampled token last, so that its own figure wins where it is among the top."""
    pairs = [*entry.top, (entry.token_id, entry.logprob)]
    return {tokens.name(token_id): _finite(logprob) for token_id, logprob in pairs}


def _ranked(entry: TokenLogprobs, tokens: TokenTexts) -> dict[str, Any]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)]
    ranked.append((entry.token_id, entry.logprob, entry.rank))
    return {
        str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokens.text(token_id)}
        for token_id, logprob, rank in ranked
    }


def _name(text: str, raw: bytes) -> str:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST  # NaN too
