"""The Triton column of the decoder operators and the cache against the reference.

Tolerances by dtype: float32 sums in another order, 2e-5. bfloat16 one step of the format (2^-7 relative) where a result is
rounded once, two where a rounded sum is normalised: a device rounds to nearest, Triton's interpreter drops the low bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Call = Callable[..., Any]
TOLERANCE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 2.0**-7, "atol": 2.0**-7}}


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(0, 8), (3, 1), (5, 97), (2, 576)])
def test_norms_match(triton_call: Call, reference_call: Call, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual, weight = noise(*shape, seed=1, dtype=dtype), noise(*shape, seed=2, dtype=dtype), noise(shape[1], seed=3, dtype=dtype)
    ours, expected = triton_call("rms_norm", x, weight, 1e-5), reference_call("rms_norm", x, weight, 1e-5)
    assert torch.allclose(ours, expected, **TOLERANCE[dtype])
    ours_pair, expected_pair = (call("add_rms_norm", x, residual, weight, 1e-5) for call in (triton_call, reference_call))
    assert torch.allclose(ours_pair[1], expected_pair[1], **TOLERANCE[dtype])
    twice = {key: 2 * value for key, value in TOLERANCE[dtype].items()}
    assert torch.allclose(ours_pair[0], expected_pair[0], **twice)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_heads_of_a_fused_projection_need_no_copy(triton_call: Call, reference_call: Call, dtype: torch.dtype) -> None:
    fused = noise(5, 5 * 64, seed=4, dtype=dtype)
    heads = fused[:, 64:256].unflatten(1, (3, 64))  # rows have gaps
    weight, angles = noise(64, seed=5, dtype=dtype), noise(5, 32, seed=6)
    assert not heads.is_contiguous()
    assert torch.allclose(triton_call("rms_norm", heads, weight, 1e-6), reference_call("rms_norm", heads, weight, 1e-6), **TOLERANCE[dtype])
    ours, expected = (call("rotate", heads, angles.cos(), angles.sin()) for call in (triton_call, reference_call))
    assert torch.allclose(ours, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("width", [1, 97, 1536])
def test_gated_activation_matches(triton_call: Call, reference_call: Call, width: int) -> None:
    gate_up = noise(3, 2 * width, seed=7) * 4
    assert torch.allclose(triton_call("silu_mul", gate_up), reference_call("silu_mul", gate_up), **TOLERANCE[torch.float32])


def test_rotation_keeps_lengths_and_turns_by_relative_position(reference_call: Call) -> None:
    x = noise(1, 1, 8, seed=8).repeat(6, 1, 1)
    angles = torch.arange(6)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    turned = reference_call("rotate", x, angles.cos(), angles.sin())
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-6)
    products = (turned[:-1] * turned[1:]).sum(-1).flatten()
    assert torch.allclose(products, products[:1].expand_as(products), atol=1e-5)


def test_store_writes_its_slots_and_nothing_else(triton_call: Call, reference_call: Call) -> None:
    fused = noise(4, 6 * 16, seed=9)
    k, v = fused[:, :48].unflatten(1, (3, 16)), fused[:, 48:].unflatten(1, (3, 16))
    slots = torch.tensor([9, -1, 2, 0])
    caches = [[torch.zeros(3, 4, 3, 16) for _ in range(2)] for _ in range(2)]
    triton_call("store_kv", k, v, *caches[0], slots)
    reference_call("store_kv", k, v, *caches[1], slots)
    for ours, expected in zip(*caches, strict=True):
        assert torch.equal(ours, expected)
    assert int((caches[0][0].flatten(0, 1).abs().sum((1, 2)) > 0).sum()) == 3


def attention_case(
    query_lens: tuple[int, ...], seq_lens: tuple[int, ...], *, heads: tuple[int, int], dim: int, seed: int
) -> dict[str, Any]:
    block_size, generator = 4, torch.Generator().manual_seed(seed)
    width = max((-(-length // block_size) for length in seq_lens), default=1)
    order = torch.randperm(len(seq_lens) * width, generator=generator).int()
    k_cache, v_cache = (noise(len(seq_lens) * width + 1, block_size, heads[1], dim, seed=seed + i) for i in (1, 2))
    return {
        "query": noise(sum(query_lens), heads[0], dim, seed=seed + 3),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "query_lens": query_lens,
        "seq_lens": seq_lens,
        "block_table": order.view(len(seq_lens), width) + 1 if seq_lens else torch.zeros(0, 1, dtype=torch.int32),
        "scale": dim**-0.5,
    }


def assert_attends_alike(
    triton_call: Call, reference_call: Call, given: dict[str, Any], name: str = "paged_attention", **extra: Any
) -> None:
    ours, expected = triton_call(name, **given, **extra), reference_call("paged_attention", **given)
    assert torch.allclose(ours, expected, **TOLERANCE[torch.float32]), float((ours - expected).abs().max())


CASES = {
    "nobody": ((), (), (3, 1), 16),
    "one token": ((1,), (1,), (3, 1), 16),
    "decode with drafts": ((5, 1, 3), (70, 9, 3), (9, 3), 64),
    "prefill beside decode": ((33, 1, 17), (33, 130, 40), (4, 2), 32),
    "odd head size": ((2, 4), (11, 6), (6, 6), 20),
    "wide group": ((3,), (21,), (20, 1), 16),
}


@pytest.mark.parametrize("case", CASES)
def test_attention_matches(triton_call: Call, reference_call: Call, case: str) -> None:
    query_lens, seq_lens, heads, dim = CASES[case]
    given = attention_case(query_lens, seq_lens, heads=heads, dim=dim, seed=len(case))
    assert_attends_alike(triton_call, reference_call, given)


@pytest.mark.parametrize("option", [{"is_causal": False}, {"window": 5}, {"window": 1}, {"is_causal": False, "window": 7}])
def test_attention_options_match(triton_call: Call, reference_call: Call, option: dict[str, Any]) -> None:
    given = attention_case((5, 1, 20), (70, 9, 31), heads=(4, 2), dim=16, seed=5)
    assert_attends_alike(triton_call, reference_call, given | option)


def tree_mask() -> torch.Tensor:
    """Two requests: an anchor with children 1, 2 and grandchildren 3 (of 1), 4 (of 2); and a chain of three."""
    mask = torch.zeros(8, 5, dtype=torch.bool)
    for row, above in enumerate([[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]):
        mask[row, above] = True
    mask[5:8, :3] = torch.ones(3, 3, dtype=torch.bool).tril()
    return mask


def test_trees_attend_to_ancestors_only(triton_call: Call, reference_call: Call) -> None:
    given = attention_case((5, 3), (70, 9), heads=(6, 2), dim=16, seed=6)
    assert_attends_alike(triton_call, reference_call, given | {"tree_mask": tree_mask()})
    chain = reference_call("paged_attention", **given)
    tree = reference_call("paged_attention", **given, tree_mask=tree_mask())
    assert torch.allclose(chain[5:], tree[5:])
    assert not torch.allclose(chain[3], tree[3])


@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_window_over_a_tree_counts_depths(triton_call: Call, reference_call: Call, window: int) -> None:
    """Row 4 (child of 2) stands two past the anchor: with a window of 2 it sees itself and row 2, with 4 one context key too."""
    given = attention_case((5, 3), (70, 9), heads=(6, 2), dim=16, seed=6) | {"tree_mask": tree_mask(), "window": window}
    assert_attends_alike(triton_call, reference_call, given)
    one_key = reference_call("paged_attention", **given)
    for key, is_seen in ((64, window > 3), (65, window > 2), (67, window > 1), (69, True)):
        changed = given | {"v_cache": given["v_cache"].clone()}
        changed["v_cache"][int(given["block_table"][0, key // 4]), key % 4] += 50.0
        assert bool((reference_call("paged_attention", **changed)[4] - one_key[4]).abs().max() > 1e-3) == is_seen, key


@pytest.mark.parametrize("num_shares", [2, 8])
@pytest.mark.parametrize("option", ["plain", "tree", "window", "tree and window"])
def test_shares_of_the_keys_add_up(triton_call: Call, reference_call: Call, num_shares: int, option: str) -> None:
    """More shares than key blocks leave some empty; a window leaves early ones without a visible key."""
    given = attention_case((5, 3), (300, 9), heads=(6, 2), dim=16, seed=7)
    given |= {
        "plain": {},
        "tree": {"tree_mask": tree_mask()},
        "window": {"window": 6},
        "tree and window": {"tree_mask": tree_mask(), "window": 2},
    }[option]
    assert_attends_alike(triton_call, reference_call, given, "paged_attention:shared_attention", num_shares=num_shares)


def test_attention_is_what_torch_computes(reference_call: Call) -> None:
    given = attention_case((7,), (7,), heads=(4, 2), dim=16, seed=8)
    slots = (given["block_table"][0].long()[:, None] * 4 + torch.arange(4)).flatten()[:7]
    keys, values = (given[name].flatten(0, 1)[slots].transpose(0, 1)[None] for name in ("k_cache", "v_cache"))
    query = given["query"].transpose(0, 1)[None]
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
    assert torch.allclose(reference_call("paged_attention", **given), expected[0].transpose(0, 1), rtol=1e-5, atol=1e-6)


def test_the_cpu_column_attends_alike(reference_call: Call) -> None:
    from specdec.kernels.dispatch import load

    for option in ({}, {"is_causal": False}, {"window": 5}, {"tree_mask": tree_mask()}, {"tree_mask": tree_mask(), "window": 2}):
        given = attention_case((5, 3), (70, 9), heads=(6, 2), dim=16, seed=9) | option
        ours, expected = load("paged_attention", "cpu")(**given), reference_call("paged_attention", **given)
        assert torch.allclose(ours, expected, **TOLERANCE[torch.float32]), option


def test_wrong_layouts_are_named() -> None:
    pytest.importorskip("triton")
    from specdec.kernels.norm_rope import rms_norm
    from specdec.kernels.paged_attention import paged_attention
    from specdec.kernels.store_kv import store_kv

    given = attention_case((2,), (9,), heads=(4, 2), dim=16, seed=1)
    with pytest.raises(ValueError, match=r"seq_lens \(99,\) must be at least"):
        paged_attention(**(given | {"seq_lens": (99,)}))
    with pytest.raises(ValueError, match="query heads must be a multiple of KV heads"):
        paged_attention(**(given | {"query": given["query"][:, :3]}))
    with pytest.raises(ValueError, match="heads of a slot must lie without gaps"):
        store_kv(
            *(noise(1, 2, 16, seed=0) for _ in range(2)),
            *(noise(3, 2, 4, 16, seed=0).transpose(1, 2) for _ in range(2)),
            torch.zeros(1).long(),
        )
    with pytest.raises(ValueError, match=r"weight has shape \(4,\)"):
        rms_norm(noise(2, 5, seed=0), noise(4, seed=0), 1e-5)
