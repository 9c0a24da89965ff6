"""Batches of documents, cut and padded, in an order that a seed and a step fix, so that a stopped run goes on where it was.

Owns: choosing and padding. Must not know: what is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from specdec.train.shards import Document

POOL = 16  # batches whose documents are sorted by length together, so that little is padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """ids [B, T] int64, own [B, T] bool (the target wrote it), aux [B, T, n, H], hidden [B, T, H]. Padding is false in `own`.

    greedy [B] bool: whether the answer was decoded at temperature 0. number: of the batch, to draw from.
    """

    ids: torch.Tensor
    own: torch.Tensor
    aux: torch.Tensor
    hidden: torch.Tensor
    greedy: torch.Tensor
    number: int


def batch_at(documents: Sequence[Document], step: int, *, batch_size: int, max_len: int, seed: int) -> Batch:
    """The batch of a step: documents in a new random order every epoch."""
    per_epoch = len(documents) // batch_size
    epoch, place = divmod(step, per_epoch)
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    pool_start = place - place % POOL
    pool_batches = min(POOL, per_epoch - pool_start)
    pool = order[pool_start * batch_size : (pool_start + pool_batches) * batch_size]
    pool.sort(key=lambda index: min(len(documents[index].ids), max_len))
    shuffled = torch.randperm(pool_batches, generator=torch.Generator().manual_seed(seed + epoch * 7919 + pool_start)).tolist()
    chosen = shuffled[place - pool_start]
    return collate([documents[index] for index in pool[chosen * batch_size : (chosen + 1) * batch_size]], max_len=max_len, number=step)


def eval_batches(documents: Sequence[Document], *, batch_size: int, max_len: int) -> Iterator[Batch]:
    """All documents once, by length."""
    ordered = sorted(documents, key=lambda document: len(document.ids))
    for start in range(0, len(ordered), batch_size):
        yield collate(ordered[start : start + batch_size], max_len=max_len)


def collate(documents: Sequence[Document], *, max_len: int, number: int = 0) -> Batch:
    """Cut behind max_len tokens and pad on the right with zeros."""
    length = min(max_len, max(len(document.ids) for document in documents))

    def padded(rows: list[torch.Tensor]) -> torch.Tensor:
        out = torch.zeros((len(rows), length, *rows[0].shape[1:]), dtype=rows[0].dtype)
        for row, source in zip(out, rows, strict=True):
            row[: min(length, len(source))] = source[:length]
        return out

    aux = [document.aux for document in documents if document.aux is not None]
    hidden = [document.hidden for document in documents if document.hidden is not None]
    return Batch(
        ids=padded([document.ids for document in documents]),
        own=padded([document.loss_mask for document in documents]),
        aux=padded(aux),
        hidden=padded(hidden),
        greedy=torch.tensor([document.temperature == 0 for document in documents]),
        number=number,
    )


def predicted_rows(owned: torch.Tensor, ahead: int, *, width: int, every: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows of a head's output [B, width, H] are trained, where row j predicts token j + ahead + 1, and on which of the target's laws.

    owned [B, T] bool: whether the target wrote token t + 1, of which row t of the laws is the law. Return flat indices of [B * width] and
    of [B * every * T]: `owned` may be every so many-th sequence of the batch only.
    """
    shifted = owned[:, ahead:][:, :width]
    sequence, row = shifted.nonzero(as_tuple=True)
    return sequence * width + row, sequence * every * owned.shape[1] + row + ahead
