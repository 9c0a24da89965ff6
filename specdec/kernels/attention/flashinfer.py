"""paged_attention by FlashInfer, where its package is installed: a plan a step and kind of layer, then a run a layer.

Owns: turning lengths and block tables into FlashInfer's page lists. Must not know: layers or requests.
Semantics: reference_layers.paged_attention. Its plans are made on the host from exact lengths, so each plan waits for the device once.
Not tried on a GPU yet: tests run it against a stand-in with FlashInfer's signatures that computes from these page lists alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch

from specdec.kernels.attention.backends import Attend
from specdec.kernels.cache_layout import check_caches

WORKSPACE_BYTES = 128 * 2**20  # what its documentation recommends


class _Kind(NamedTuple):
    """What layers must share to share a plan."""

    is_causal: bool
    window: int | None
    scale: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


@dataclass(slots=True)
class _Planned:
    """A wrapper, and the very tensors that it was planned for: every step and pass has new ones."""

    wrapper: Any
    step: tuple[Any, ...] = ()

    def is_for(self, step: tuple[Any, ...]) -> bool:
        return len(self.step) == len(step) and all(mine is theirs for mine, theirs in zip(self.step, step, strict=True))


def make_backend() -> Attend:
    """A backend with a workspace of its own."""
    return FlashInfer(import_module("flashinfer"))


class FlashInfer:
    """Calls the library's paged prefill, which takes queries of any length."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._workspace: torch.Tensor | None = None
        self._planned: dict[_Kind, _Planned] = {}

    def __call__(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        query_lens: tuple[int, ...],
        seq_lens: tuple[int, ...],
        block_table: torch.Tensor,
        scale: float,
        is_causal: bool = True,
        tree_mask: torch.Tensor | None = None,
        window: int | None = None,
        device_lens: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """As reference_layers.paged_attention."""
        check_caches(k_cache, v_cache)
        if not len(query):
            return torch.empty_like(query)
        kind = _Kind(is_causal, window, scale, query.shape[1], *k_cache.shape[2:], k_cache.shape[1], query.dtype)
        if kind not in self._planned:
            self._planned[kind] = _Planned(self._wrapper(query.device))
        planned, step = self._planned[kind], (block_table, tree_mask, *(device_lens or (query_lens, seq_lens)))
        if not planned.is_for(step):
            if device_lens is not None:
                query_lens, seq_lens = tuple(device_lens[0].diff().tolist()), tuple(device_lens[1].tolist())
            self._plan(planned.wrapper, kind, query_lens, seq_lens, block_table, tree_mask)
            planned.step = step
        attended: torch.Tensor = planned.wrapper.run(query, (k_cache, v_cache))
        return attended

    def _wrapper(self, device: torch.device) -> Any:
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")

    def _plan(
        self,
        wrapper: Any,
        kind: _Kind,
        query_lens: tuple[int, ...],
        seq_lens: tuple[int, ...],
        block_table: torch.Tensor,
        tree_mask: torch.Tensor | None,
    ) -> None:
        device, size = block_table.device, kind.block_size
        counts = [-(-length // size) for length in seq_lens]
        pages = torch.cat([block_table[request, :count] for request, count in enumerate(counts)])
        last = torch.tensor([length - (count - 1) * size for length, count in zip(seq_lens, counts, strict=True)], dtype=torch.int32)
        mask = None if tree_mask is None else _tree_mask(tree_mask, query_lens, seq_lens, kind.window)
        wrapper.plan(
            _bounds(query_lens).to(device),
            _bounds(counts).to(device),
            pages,
            last.to(device),
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            size,
            custom_mask=mask,
            causal=kind.is_causal and mask is None,
            sm_scale=kind.scale,
            window_left=-1 if kind.window is None or mask is not None else kind.window - 1,
            q_data_type=kind.dtype,
            kv_data_type=kind.dtype,
        )


def _bounds(counts: tuple[int, ...] | list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _tree_mask(tree_mask: torch.Tensor, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], window: int | None) -> torch.Tensor:
    """Each request's [query_len, seq_len] mask, flattened and joined; a window counts depths."""
    parts, start = [], 0
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        tree, context = tree_mask[start : start + query_len, :query_len], seq_len - query_len
        mask = torch.cat((tree.new_ones(query_len, context), tree), dim=1)
        if window is not None:
            depths = context + tree.sum(-1) - 1
            mask &= torch.cat((torch.arange(context, device=tree.device), depths))[None] > depths[:, None] - window
        parts.append(mask.flatten())
        start += query_len
    return torch.cat(parts)
