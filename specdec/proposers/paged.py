"""Rows of a draft pass over paged KV: which positions are fed, where their KV goes, and which keys they see.

Owns: the arithmetic between positions and slots, and what of a draft cache is still valid. Must not know: any model.
Letters: N query rows of the pass, P spans, R requests of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdec.models.attention import AttentionMetadata
from specdec.proposers.base import DraftRail, StepView


class Span(NamedTuple):
    """Positions start to stop - 1 of one request of the batch; never empty."""

    request: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """One pass. owner [N]: batch index of each row; positions [N]; last [P]: each span's last row."""

    owner: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor
    meta: AttentionMetadata


def paged_rows(rail: DraftRail, step: StepView, spans: Sequence[Span], *, is_causal: bool = True) -> PagedRows:
    """Lay out the rows of `spans`; each sees its request's positions from 0, and itself, through the shared block table."""
    device = step.rows.device
    lens = [span.stop - span.start for span in spans]
    requests = torch.tensor([span.request for span in spans], device=device)  # [P]
    counts = torch.tensor(lens, device=device)
    ends = counts.cumsum(0)
    total = sum(lens)
    owner = torch.repeat_interleave(requests, counts, output_size=total)
    shift = torch.tensor([span.start for span in spans], device=device) - (ends - counts)  # position of row n is n + shift
    positions = torch.arange(total, device=device) + torch.repeat_interleave(shift, counts, output_size=total)
    slots = step.block_table[owner, positions // rail.block_size].long() * rail.block_size + positions % rail.block_size
    meta: AttentionMetadata = rail.build_attention(
        query_lens=lens,
        seq_lens=[span.stop for span in spans],
        block_table=step.block_table[requests],
        slot_mapping=slots,
        is_causal=is_causal,
    )
    return PagedRows(owner=owner, positions=positions, last=ends - 1, meta=meta)


def committed_ids(step: StepView, rows: PagedRows) -> torch.Tensor:
    """Return the committed tokens [N] int64 at the rows' positions."""
    return step.token_ids[step.rows[rows.owner], rows.positions].long()


class StepLengths(NamedTuple):
    """One request of a step in numbers: tokens computed before and after it, and tokens it has sampled in it."""

    context: int
    num_computed: int
    num_sampled: int


def step_lengths(step: StepView) -> list[StepLengths]:
    """Return each request's lengths on the host, with one transfer."""
    query_lens = (step.cu_query_lens[1:] - step.cu_query_lens[:-1]).to(step.num_computed)
    context = step.num_computed - query_lens + step.num_rejected
    return [StepLengths(*lengths) for lengths in torch.stack((context, step.num_computed, step.num_sampled), dim=1).tolist()]


class DraftExtent:
    """How far each row's draft KV agrees with the committed text, so that a pass feeds only what is missing.

    A row that is new starts at its context: what a prefix hit brought in lies in shared blocks, draft KV included. Drafts
    whose KV was written while drafting count as far as they became text.
    """

    def __init__(self) -> None:
        self._stop: dict[int, int] = {}  # by persistent row: positions below it hold KV of committed text
        self._ahead: dict[int, list[int]] = {}  # ids whose KV was written from there on while drafting

    def forget(self, rows: Sequence[int]) -> None:
        """The rows belong to somebody else now."""
        for row in rows:
            self._stop.pop(row, None)
            self._ahead.pop(row, None)

    def valid(self, step: StepView, lengths: Sequence[StepLengths]) -> list[int]:
        """Return, per request of the batch, the first position whose draft KV is missing; at most num_computed."""
        found = []
        for row, length in zip(step.rows.tolist(), lengths, strict=True):
            start = self._stop.get(row, length.context)
            ahead = self._ahead.pop(row, ())
            if ahead:
                text = step.token_ids[row, start : start + len(ahead)].tolist()
                start += next((i for i, (draft, token) in enumerate(zip(ahead, text, strict=True)) if draft != token), len(ahead))
            found.append(min(start, length.num_computed))
        return found

    def record(self, row: int, stop: int, ahead: Sequence[int] = ()) -> None:
        """Positions below `stop` hold KV of committed text, and those of `ahead` follow as drafted."""
        self._stop[row] = stop
        if ahead:
            self._ahead[row] = list(ahead)
