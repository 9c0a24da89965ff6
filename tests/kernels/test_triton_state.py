"""The Triton column of the bookkeeping kernels against the reference, and what they promise about each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Call = Callable[..., Any]
MAX_LEN, BLOCK_SIZE = 40, 4


def step(*, with_tree: bool) -> dict[str, Any]:
    """A prefill chunk, a decode with three drafts, a plain decode, a decode whose second draft was refused, a last chunk."""
    generator = torch.Generator().manual_seed(1)
    query_lens, num_drafts, num_logits = [7, 4, 1, 4, 3], [0, 3, 0, 3, 0], [0, 4, 1, 4, 1]
    drafts = torch.tensor([[-1, -1, -1], [11, 12, 13], [-1, -1, -1], [21, -1, 23], [-1, -1, -1]])
    rows = torch.tensor([4, 0, 6, 2, 5])
    computed = torch.zeros(8, dtype=torch.int64)
    computed[rows] = torch.tensor([0, 9, 30, 3, 12])
    return {
        "rows": rows,
        "draft_token_ids": drafts,
        "cu_query_lens": torch.tensor([0, *query_lens]).cumsum(0).int(),
        "cu_num_logits": torch.tensor([0, *num_logits]).cumsum(0).int(),
        "num_drafts": torch.tensor(num_drafts),
        "num_computed_tokens": computed,
        "token_ids": torch.randint(50, 90, (8, MAX_LEN), generator=generator).int(),
        "block_table": (torch.randperm(5 * 10, generator=generator).int() + 1).view(5, 10),
        "block_size": BLOCK_SIZE,
        "num_query_rows": sum(query_lens),
        "num_logits": sum(num_logits),
        "parents": torch.tensor([[-1, -1, -1], [-1, -1, 1], [-1, -1, -1], [-1, 0, 0], [-1, -1, -1]]) if with_tree else None,
    }


@pytest.mark.parametrize("with_tree", [False, True])
def test_inputs_match(triton_call: Call, reference_call: Call, with_tree: bool) -> None:
    ours, expected = (call("prepare_inputs", **step(with_tree=with_tree)) for call in (triton_call, reference_call))
    for name, mine, theirs in zip(expected._fields, ours, expected, strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs), name


def test_inputs_are_laid_out_as_the_seam_says(reference_call: Call) -> None:
    given = step(with_tree=True)
    out = reference_call("prepare_inputs", **given)
    decode = slice(7, 11)  # anchor at position 9, drafts 11 and 12 under it, 13 under 12
    assert out.input_ids[decode].tolist() == [int(given["token_ids"][0, 9]), 11, 12, 13]
    assert out.positions[decode].tolist() == [9, 10, 10, 11]
    assert out.parents[decode].tolist() == [-1, -1, -1, 1]
    table = given["block_table"][1]
    assert out.slot_mapping[decode].tolist() == [int(table[at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE for at in (9, 10, 11, 12)]
    assert out.logits_indices.tolist() == [7, 8, 9, 10, 11, 12, 13, 14, 15, 18]
    assert out.input_ids[14] == 0  # a refused draft keeps its row
    assert out.seq_lens.tolist() == [7, 13, 31, 7, 15]


def commit(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.tensor([4, 0, 6, 2]),
        "sampled_token_ids": torch.tensor([[7, 8, 9, -1], [5, -1, -1, -1], [-1, -1, -1, -1], [1, 2, 3, 4]]),
        "num_sampled": torch.tensor([3, 1, 0, 4]),
        "num_rejected": torch.tensor([1, 3, 0, 0]),
        "cu_query_lens": torch.tensor([0, 4, 8, 15, 19], dtype=torch.int32),
        "token_ids": torch.randint(50, 90, (8, MAX_LEN), generator=generator).int(),
        "num_tokens": torch.tensor([10, 0, 38, 0, 20, 0, 12, 0]),
        "num_computed_tokens": torch.tensor([9, 0, 37, 0, 19, 0, 0, 0]),
    }


def test_commits_match_and_leave_one_uncomputed_token(triton_call: Call, reference_call: Call) -> None:
    ours, expected = commit(0), commit(0)
    triton_call("post_update", **ours)
    reference_call("post_update", **expected)
    for name in ("token_ids", "num_tokens", "num_computed_tokens"):
        assert torch.equal(ours[name], expected[name]), name
    for row in (4, 0, 2):  # the decoding requests
        assert int(ours["num_tokens"][row] - ours["num_computed_tokens"][row]) == 1
    assert ours["token_ids"][4, 20:23].tolist() == [7, 8, 9]
    assert ours["token_ids"][2, 38:].tolist() == [1, 2]  # the row ends at 40
    untouched = commit(0)["token_ids"]
    assert torch.equal(ours["token_ids"][[1, 3, 5, 6, 7]], untouched[[1, 3, 5, 6, 7]])


def cache_case() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    k_cache, v_cache = (torch.randn(7, 4, 2, 8, generator=generator) for _ in range(2))
    return {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "path": torch.tensor([[0, 2, 4, 5], [0, 1, 2, -1], [0, -1, -1, -1], [0, 3, -1, -1]]),
        "num_sampled": torch.tensor([4, 3, 1, 2]),
        "first_row": torch.tensor([0, 6, 10, 11]),
        "slot_mapping": torch.tensor([5, 6, 7, 20, 21, 22, 8, 9, 10, 11, 2, 14, 15, 24, 25]),
    }


def test_kept_rows_move_together(triton_call: Call, reference_call: Call) -> None:
    ours, expected, before = cache_case(), cache_case(), cache_case()
    triton_call("compact_kv", **ours)
    reference_call("compact_kv", **expected)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(ours[name], expected[name]), name
        old, new = before[name].flatten(0, 1), ours[name].flatten(0, 1)
        assert torch.equal(new[[6, 7, 20]], old[[7, 21, 22]])
        assert torch.equal(new[[8, 9, 10, 11, 2]], old[[8, 9, 10, 11, 2]])  # a chain copies nothing
        assert torch.equal(new[15], old[25])


@pytest.mark.parametrize("name", ["prepare_inputs", "post_update", "compact_kv"])
def test_an_empty_batch_does_nothing(triton_call: Call, reference_call: Call, name: str) -> None:
    base = {"prepare_inputs": step(with_tree=False), "post_update": commit(0), "compact_kv": cache_case()}[name]
    persistent = {"k_cache", "v_cache", "slot_mapping", "num_computed_tokens", "token_ids", "num_tokens", "num_query_rows", "num_logits"}
    given = {
        key: value[:1] if key.startswith("cu_") else value[:0] if isinstance(value, torch.Tensor) and key not in persistent else value
        for key, value in base.items()
    }
    if name == "prepare_inputs":
        given |= {"num_query_rows": 0, "num_logits": 0}
    results = [call(name, **given) for call in (triton_call, reference_call)]
    if name == "prepare_inputs":
        assert all(field is None or field.numel() == 0 for result in results for field in result)


def test_bad_state_is_named() -> None:
    pytest.importorskip("triton")
    from specdec.kernels.input_prep import prepare_inputs

    given = step(with_tree=False)
    with pytest.raises(ValueError, match=r"num_drafts has shape \(2,\), but it must be \(5,\)"):
        prepare_inputs(**(given | {"num_drafts": torch.zeros(2, dtype=torch.int64)}))
    with pytest.raises(ValueError, match=r"block_table has dtype torch\.int64"):
        prepare_inputs(**(given | {"block_table": given["block_table"].long()}))
