"""The ids that a draft head can draft: those that the target writes most, by count over its own answers.

Owns: the choice, and the two maps of the EAGLE-3 format. Source: FR-Spec (2502.14856); the offsets are SafeAILab's format.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from specdec.errors import ConfigError
from specdec.train.shards import Document


def count_ids(documents: Iterable[Document], vocab_size: int) -> torch.Tensor:
    """How often the target wrote each id, [V] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for document in documents:
        counts += torch.bincount(document.ids[document.prompt_len :], minlength=vocab_size)
    return counts


def choose_draft_ids(counts: torch.Tensor, size: int, *, always: Sequence[int] = ()) -> torch.Tensor:
    """Return the target ids [Vd] int64 of the draft vocabulary, ascending: `always` (special tokens) and then the most frequent.

    Raises:
        ConfigError: size is not in 1..V.
    """
    if not 0 < size <= len(counts):
        raise ConfigError(f"draft-vocab-size is {size}, but it must lie in 1..{len(counts)}, the target's vocabulary")
    ranked = counts.clone()
    ranked[list(always)] = counts.max() + 1
    return ranked.argsort(descending=True, stable=True)[:size].sort().values


def offset_maps(draft_ids: torch.Tensor, vocab_size: int) -> dict[str, torch.Tensor]:
    """`d2t` [Vd] int64: target id minus draft id; `t2d` [V] bool: which target ids have a draft id."""
    has_draft_id = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, draft_ids, True)
    return {"d2t": draft_ids - torch.arange(len(draft_ids)), "t2d": has_draft_id}
