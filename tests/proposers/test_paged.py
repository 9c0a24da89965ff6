"""What of a draft cache agrees with the committed text, step by step."""

from __future__ import annotations

import torch

from specdec.proposers.base import StepView
from specdec.proposers.paged import DraftExtent, step_lengths
from tests.proposers.views import view


def after(text: list[int], *, num_computed: int, query_len: int, num_rejected: int = 0) -> StepView:
    """A step of one request that has this text, of which num_computed tokens have KV."""
    return view(
        1,
        cu_query_lens=torch.tensor([0, query_len], dtype=torch.int32),
        num_rejected=torch.tensor([num_rejected]),
        num_computed=torch.tensor([num_computed]),
        token_ids=torch.tensor([text + [0] * (32 - len(text))], dtype=torch.int32),
        num_tokens=torch.tensor([len(text)]),
    )


def valid(extent: DraftExtent, step: StepView) -> int:
    return extent.valid(step, step_lengths(step))[0]


def test_lengths_of_a_step_with_rejected_drafts() -> None:
    step = after([1, 2, 3, 4, 5, 6], num_computed=5, query_len=4, num_rejected=2)
    assert step_lengths(step)[0] == (3, 5, 1)


def test_a_new_row_starts_at_its_context() -> None:
    extent = DraftExtent()
    assert valid(extent, after([1, 2, 3, 4, 5], num_computed=4, query_len=4)) == 0
    assert valid(extent, after([1, 2, 3, 4, 5, 6, 7, 8, 9], num_computed=8, query_len=4)) == 4


def test_drafts_count_as_far_as_they_became_text() -> None:
    for accepted in range(4):
        extent = DraftExtent()
        extent.record(0, 4, [5, 6, 7])  # text 1 2 3 4, then drafts 5 6 7 8 of which the last was never fed
        text = [1, 2, 3, 4, *[5, 6, 7][:accepted], 90]
        step = after(text, num_computed=len(text) - 1, query_len=5, num_rejected=4 - accepted)
        assert valid(extent, step) == 4 + accepted


def test_text_that_another_source_wrote_does_not_count() -> None:
    extent = DraftExtent()
    extent.record(0, 4, [5, 6, 7])
    assert valid(extent, after([1, 2, 3, 4, 5, 60, 7, 8], num_computed=7, query_len=4)) == 5


def test_nothing_counts_past_the_target() -> None:
    extent = DraftExtent()
    extent.record(0, 9)
    assert valid(extent, after([1, 2, 3, 4], num_computed=3, query_len=1)) == 3


def test_forgotten_rows_start_again() -> None:
    extent = DraftExtent()
    extent.record(0, 6, [7])
    extent.forget([0])
    assert valid(extent, after([1, 2, 3, 4, 5, 6, 7, 8], num_computed=7, query_len=7)) == 0
