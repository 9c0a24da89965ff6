"""How a head in training would serve: held-out greedy answers are walked through as a server does, block by block.

Owns: where blocks begin, and what is accepted. Must not know: how drafts are made.
A block begins behind the last token of the block before it, not everywhere: places where drafts fail are begun at more often, so shares
over all places promise too much. Letters: B sequences, T tokens, S drafts of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specdec.train.batches import Batch, eval_batches
from specdec.train.shards import Document

MAX_DOCUMENTS = 96
NO_DRAFT = -1  # the id of no token


class Drafter(Protocol):
    """A head, as far as its drafts are asked for."""

    def drafts(self, batch: Batch) -> torch.Tensor:
        """Return [B, T, S] int64: at place t, the ids drafted for the tokens behind token t when that is the last one known.

        NO_DRAFT where none is made. Draft s may read the text's own tokens up to t + s: behind a wrong draft nothing counts.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a server counts. by_position: share of blocks whose first s + 1 drafts are all accepted [S]."""

    by_position: tuple[float, ...]
    num_blocks: int

    @property
    def mean_length(self) -> float:
        """Tokens that a verify pass emits."""
        return 1 + sum(self.by_position)


@torch.no_grad()
def serve_held_out(head: Drafter, documents: Sequence[Document], *, batch_size: int, max_len: int) -> Served | None:
    """Walk through the greedy ones of `documents`, MAX_DOCUMENTS at most; None where no block begins."""
    greedy = [document for document in documents if document.temperature == 0][:MAX_DOCUMENTS]
    blocks: list[int] = []
    hits: list[torch.Tensor] = []
    for batch in eval_batches(greedy, batch_size=batch_size, max_len=max_len):
        drafts = head.drafts(batch)
        lengths = accepted_lengths(drafts, batch.ids)
        walked = [length for row, own in zip(lengths, batch.own, strict=True) for length in walk(row, own)]
        blocks += walked
        hits.append((torch.tensor(walked)[:, None] > torch.arange(drafts.shape[2])).sum(dim=0))
    if not blocks:
        return None
    shares = torch.stack(hits).sum(dim=0) / len(blocks)
    return Served(by_position=tuple(shares.tolist()), num_blocks=len(blocks))


def accepted_lengths(drafts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """drafts [B, T, S] against the text ids [B, T] -> [B, T] drafts accepted, were a block to begin at each place."""
    (_, length, count) = drafts.shape
    places = torch.arange(length)[:, None] + torch.arange(1, count + 1)
    right = (drafts == ids[:, places.clamp(max=length - 1)]) & (places < length)
    return right.long().cumprod(dim=2).sum(dim=2)


def walk(lengths: torch.Tensor, own: torch.Tensor) -> list[int]:
    """Drafts accepted in each block of one answer. lengths [T]: see accepted_lengths; own [T] bool: the answer, one run of places."""
    places = own.nonzero()[:, 0].tolist()
    if not places:
        return []
    place, last = places[0], places[-1]  # the target itself writes the first token
    found = []
    while last - place > 1:  # and the last one: a block ends with a token of the target's
        found.append(min(int(lengths[place]), last - place - 1))
        place += found[-1] + 1
    return found
