"""Attention backends other than our own compute what the reference does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.kernels.attention import sdpa
from specdec.kernels.attention.backends import load_backend
from specdec.kernels.attention.flashinfer import FlashInfer
from specdec.kernels.dispatch import load
from tests.kernels.test_triton_layers import CASES, TOLERANCE, attention_case, tree_mask


class StandIn:
    """FlashInfer's paged prefill by its documented signatures, computed from the page lists alone."""

    plans = 0

    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert workspace.dtype is torch.uint8
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        custom_mask: torch.Tensor | None,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        StandIn.plans += 1
        assert num_qo_heads % num_kv_heads == 0
        assert {tensor.dtype for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)} == {torch.int32}
        assert q_data_type is kv_data_type
        self.head_dim, self.scale, self.size = head_dim_qk, sm_scale, page_size
        self.rows, self.pages, self.last = qo_indptr.tolist(), paged_kv_indptr.tolist(), paged_kv_last_page_len.tolist()
        self.indices, self.mask, self.causal, self.window_left = paged_kv_indices.long(), custom_mask, causal, window_left

    def run(self, query: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        out, masks = torch.empty_like(query), 0
        for request, last in enumerate(self.last):
            pages = self.indices[self.pages[request] : self.pages[request + 1]]
            seq_len = (len(pages) - 1) * self.size + last
            keys, values = (cache[pages].flatten(0, 1)[:seq_len] for cache in kv)
            rows = slice(self.rows[request], self.rows[request + 1])
            query_len = rows.stop - rows.start
            place = torch.arange(seq_len - query_len, seq_len)[:, None]
            mask = torch.ones(query_len, seq_len, dtype=torch.bool)
            if self.mask is not None:
                mask, masks = self.mask[masks : masks + mask.numel()].view_as(mask), masks + mask.numel()
            if self.causal:
                mask = mask & (torch.arange(seq_len) <= place)
            if self.window_left >= 0:
                mask = mask & (torch.arange(seq_len) >= place - self.window_left)
            heads = (x.transpose(0, 1)[None] for x in (query[rows], keys, values))
            attended = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, scale=self.scale, enable_gqa=True)
            out[rows] = attended[0].transpose(0, 1)
        return out


LIBRARY = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=StandIn)
BACKENDS: dict[str, Callable[[], Callable[..., torch.Tensor]]] = {"sdpa": sdpa.make_backend, "flashinfer": lambda: FlashInfer(LIBRARY)}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": False},
    {"window": 5},
    {"window": 1},
    {"is_causal": False, "window": 7},
    {"tree_mask": tree_mask()},
    {"tree_mask": tree_mask(), "window": 2},
]


def assert_alike(backend: str, given: dict[str, Any], **extra: Any) -> None:
    expected = load("paged_attention", "reference")(**given)
    ours = BACKENDS[backend]()(**(given | extra))
    assert torch.allclose(ours, expected, **TOLERANCE[torch.float32]), float((ours - expected).abs().max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_lengths_and_heads(backend: str, case: str) -> None:
    query_lens, seq_lens, heads, dim = CASES[case]
    assert_alike(backend, attention_case(query_lens, seq_lens, heads=heads, dim=dim, seed=len(case)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(backend: str, option: dict[str, Any]) -> None:
    assert_alike(backend, attention_case((5, 3), (70, 9), heads=(6, 2), dim=16, seed=5) | option)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_of_the_device_win_over_bounds_of_the_host(backend: str) -> None:
    lens = torch.tensor([0, 5, 8], dtype=torch.int32), torch.tensor([70, 9], dtype=torch.int32)
    given = attention_case((5, 3), (70, 9), heads=(6, 2), dim=16, seed=5)
    assert_alike(backend, given, query_lens=(6, 6), seq_lens=(72, 72), device_lens=lens)


def test_what_a_freed_block_holds_reaches_nobody() -> None:
    given = attention_case((5, 3), (70, 9), heads=(6, 2), dim=16, seed=5)
    expected = load("paged_attention", "reference")(**given)
    for name in ("k_cache", "v_cache"):
        given[name][given["block_table"][1, 9 // 4], 9 % 4 :] = float("nan")
    assert torch.allclose(sdpa.paged_attention(**given), expected, **TOLERANCE[torch.float32])


def test_layers_of_a_step_share_a_plan_and_steps_do_not() -> None:
    backend = FlashInfer(LIBRARY)
    given = attention_case((5, 3), (70, 9), heads=(6, 2), dim=16, seed=5)
    lens = torch.tensor([0, 5, 8], dtype=torch.int32), torch.tensor([70, 9], dtype=torch.int32)
    before = StandIn.plans
    backend(**given, device_lens=lens)
    backend(**given, device_lens=lens)
    assert StandIn.plans == before + 1
    backend(**given, device_lens=lens, window=5)
    assert StandIn.plans == before + 2
    later = attention_case((3, 5), (9, 70), heads=(6, 2), dim=16, seed=6)
    lens = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([9, 70], dtype=torch.int32)
    ours = backend(**later, device_lens=lens)
    assert StandIn.plans == before + 3
    assert torch.allclose(ours, load("paged_attention", "reference")(**later), **TOLERANCE[torch.float32])


def test_backends_are_found_by_name() -> None:
    assert load_backend("auto") is load_backend("triton") is None
    assert load_backend("sdpa") is sdpa.paged_attention
    with pytest.raises(ValueError, match="unknown attention backend 'xformers'"):
        load_backend("xformers")
