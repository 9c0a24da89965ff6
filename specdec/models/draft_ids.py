"""read_id_map: from a head's own ids to the target's, as `d2t` or `t2d` of its checkpoint say.

Owns: reading and checking the two maps. Must not know: the head. Letters: V target and Vd draft vocabulary.
"""

from __future__ import annotations

import torch

from specdec.errors import ConfigError
from specdec.logging import get_logger
from specdec.models.draft_head import HeadReader

logger = get_logger(__name__)


def read_id_map(reader: HeadReader, draft_vocab: int, vocab: int, *, device: torch.device) -> torch.Tensor | None:
    """Target id [Vd] int64 of each draft id from `d2t`, which holds differences; None where the vocabularies are one.

    Raises:
        ConfigError: the map is missing, leaves the vocabulary, or names a target id twice.
    """
    checkpoint = reader.checkpoint
    known = checkpoint.take(f"{reader.base}t2d", (vocab,)).bool().cpu() if reader.has("t2d") else None
    if not reader.has("d2t") and (known is not None or draft_vocab == vocab):
        ids = torch.arange(vocab) if known is None else known.nonzero()[:, 0]
    else:
        ids = torch.arange(draft_vocab) + checkpoint.take(f"{reader.base}d2t", (draft_vocab,)).long().cpu()
    if len(ids) != draft_vocab:
        raise ConfigError(f"t2d marks {len(ids)} target ids, but draft_vocab_size is {draft_vocab}", hint="export the draft again")
    outside = ((ids < 0) | (ids >= vocab)).nonzero()[:, 0]
    if len(outside):
        first = int(outside[0])
        message = f"d2t sends draft id {first} to target id {int(ids[first])}, but the target has ids 0 to {vocab - 1}"
        raise ConfigError(message, hint="d2t must hold target id minus draft id; export the draft again")
    if len(ids.unique()) != draft_vocab:
        twice = int(ids.bincount(minlength=vocab).argmax())
        raise ConfigError(f"d2t sends several draft ids to target id {twice}", hint="export the draft again")
    if known is not None and not bool(known[ids].all()):
        logger.warning("t2d and d2t of the draft head disagree; d2t is used")
    return None if torch.equal(ids, torch.arange(vocab)) else ids.to(device)
