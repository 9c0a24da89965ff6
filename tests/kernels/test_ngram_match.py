"""Prompt lookup in all columns: what matches, what is copied, and that the proposer over it drafts what `ngram` drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.kernels.dispatch import load
from specdec.proposers.ngram_index import NgramIndex

Call = Callable[..., Any]
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=24), min_size=1, max_size=5)


def case(texts: list[list[int]], limits: list[int], *, width: int = 4, max_len: int = 30) -> dict[str, Any]:
    """Texts in shuffled rows; behind each lies a token of an earlier owner, which must not be read as text."""
    order = torch.randperm(len(texts) + 2, generator=torch.Generator().manual_seed(len(texts)))[: len(texts)]
    token_ids = torch.full((len(texts) + 2, max_len), 1, dtype=torch.int32)
    num_tokens = torch.zeros(len(texts) + 2, dtype=torch.int64)
    for row, text in zip(order.tolist(), texts, strict=True):
        token_ids[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        num_tokens[row] = len(text)
    return {"rows": order, "limits": torch.tensor(limits), "token_ids": token_ids, "num_tokens": num_tokens, "width": width}


def assert_same(ours: Any, expected: Any) -> None:
    for name, mine, theirs in zip(expected._fields, ours, expected, strict=True):
        assert torch.equal(mine, theirs), name


def drafts_of(found: Any) -> list[list[int]]:
    return [row[:count] for row, count in zip(found.token_ids.tolist(), found.num_tokens.tolist(), strict=True)]


def indexed(text: list[int], limit: int, shortest: int, longest: int) -> list[int]:
    index = NgramIndex(shortest, longest)
    index.extend(text)
    return index.lookup(limit)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(1, 3), st.integers(0, 3), st.integers(0, 4))
def test_host_columns_draft_what_the_index_drafts(texts: list[list[int]], shortest: int, more: int, limit: int) -> None:
    bounds = {"shortest": shortest, "longest": shortest + more}
    arguments = case(texts, [limit] * len(texts)) | bounds
    expected = load("ngram_match", "reference")(**arguments)
    assert_same(load("ngram_match", "cpu")(**arguments), expected)
    assert drafts_of(expected) == [indexed(text, limit, **bounds) for text in texts]


@pytest.mark.parametrize("bounds", [(1, 1), (2, 5), (5, 5)])
def test_the_triton_column_drafts_what_the_index_drafts(triton_call: Call, reference_call: Call, bounds: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(sum(bounds))
    texts = [torch.randint(0, 2, (length,), generator=generator).tolist() for length in (0, 1, 2, 5, 17, 24, 24)]
    limits = [4, 4, 4, 3, 4, 0, 1]
    arguments = case(texts, limits) | {"shortest": bounds[0], "longest": bounds[1]}
    found = triton_call("ngram_match", **arguments)
    assert_same(found, reference_call("ngram_match", **arguments))
    assert drafts_of(found) == [indexed(text, limit, *bounds) for text, limit in zip(texts, limits, strict=True)]
    assert int(found.num_tokens.sum()) > 0
    assert found.num_tokens[5] == 0, "a limit of 0 looks nothing up"


def test_matches_are_found_across_and_behind_blocks(triton_call: Call, reference_call: Call) -> None:
    """Texts longer than one block of 1024: an early long match, a match that straddles the border, and a late short one."""
    long = list(range(100, 2300))
    end = [7, 8, 9]
    early, straddling, late = ([*long[:at], 7, 8, 9, 50 + at % 7, *long[at:]] for at in (3, 1022, 2000))
    both = [*early[:2100], 1, 8, 9, 60, *early[2100:]]
    arguments = case([[*text, *end] for text in (early, straddling, late, both)], [4] * 4, max_len=2300) | {"shortest": 2, "longest": 3}
    found = triton_call("ngram_match", **arguments)
    assert_same(found, reference_call("ngram_match", **arguments))
    assert found.token_ids[:, 0].tolist() == [53, 50, 55, 53]
    assert found.match_lens.tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("column", ["reference", "cpu", "triton"])
def test_the_longest_match_wins_then_the_latest(column: str, triton_call: Call) -> None:
    texts = [[1, 2, 3, 9, 1, 2, 3, 8, 4, 3, 7, 1, 2, 3], [5, 5, 5, 5], [1, 2, 3, 4], [6, 1, 6]]
    arguments = case(texts, [4] * 4) | {"shortest": 1, "longest": 3}
    found = triton_call("ngram_match", **arguments) if column == "triton" else load("ngram_match", column)(**arguments)
    assert drafts_of(found) == [[8, 4, 3, 7], [5], [], [1, 6]]
    assert found.match_lens.tolist() == [3, 3, 0, 1]
    assert found.token_ids[1].tolist() == [5, -1, -1, -1], "a short continuation is not padded out"


@pytest.mark.parametrize("column", ["reference", "cpu", "triton"])
def test_nobody_and_no_width_draft_nothing(column: str, triton_call: Call) -> None:
    call = triton_call if column == "triton" else lambda name, **arguments: load(name, column)(**arguments)
    bounds = {"shortest": 1, "longest": 2}
    state = case([[1, 1]], [0])
    nobody = {"rows": torch.zeros(0).long(), "limits": torch.zeros(0).long()}
    assert call("ngram_match", **(state | bounds | nobody)).token_ids.shape == (0, 4)
    assert call("ngram_match", **(state | bounds | {"width": 0})).num_tokens.tolist() == [0]


def test_bad_bounds_and_shapes_are_named() -> None:
    pytest.importorskip("triton")
    from specdec.kernels.ngram_match import ngram_match

    state = case([[1, 1]], [2])
    with pytest.raises(ValueError, match="shortest is 3 and longest 2"):
        ngram_match(**state, shortest=3, longest=2)
    with pytest.raises(ValueError, match=r"limits has shape \(2,\), but it must be \(1,\)"):
        ngram_match(**(state | {"limits": torch.zeros(2).long()}), shortest=1, longest=2)
