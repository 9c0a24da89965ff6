"""Triton: move the kept rows of verified trees together in the cache. Semantics: reference_state.compact_kv.

Owns: one kernel. Must not know: how rows were chosen; everything after verification reads `path` only. Read next: store_kv.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec.kernels.cache_layout import check_caches
from specdec.kernels.checks import check

_INT = (torch.int64,)


@triton.jit
def _compact_kv_kernel(
    k_cache_ptr, v_cache_ptr, path_ptr, num_sampled_ptr, first_row_ptr, slot_ptr, block_stride, slot_stride, BLOCK_SIZE, WIDTH,
    PATH_WIDTH, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per (request, block of Hkv * Dh), rows in rising order.

    Each entry is read and written by the thread that owns it, and a source row lies at or after its target, so the order
    inside one program is all that is needed.
    """
    request = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < WIDTH
    first = tl.load(first_row_ptr + request)
    num_kept = tl.load(num_sampled_ptr + request).to(tl.int32)
    for i in range(1, num_kept):
        kept = tl.load(path_ptr + request * PATH_WIDTH + i)
        if kept != i:
            source = tl.load(slot_ptr + first + kept)
            target = tl.load(slot_ptr + first + i)
            source_at = (source // BLOCK_SIZE) * block_stride + (source % BLOCK_SIZE) * slot_stride + offsets
            target_at = (target // BLOCK_SIZE) * block_stride + (target % BLOCK_SIZE) * slot_stride + offsets
            k = tl.load(k_cache_ptr + source_at, mask=inside)
            v = tl.load(v_cache_ptr + source_at, mask=inside)
            tl.store(k_cache_ptr + target_at, k, mask=inside)
            tl.store(v_cache_ptr + target_at, v, mask=inside)


def compact_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    path: torch.Tensor,
    num_sampled: torch.Tensor,
    first_row: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """As reference_state.compact_kv."""
    block_stride, slot_stride = check_caches(k_cache, v_cache)
    num_requests, path_width = path.shape
    check(
        {
            "path": (path, (num_requests, path_width), _INT),
            "num_sampled": (num_sampled, (num_requests,), _INT),
            "first_row": (first_row, (num_requests,), _INT),
            "slot_mapping": (slot_mapping, tuple(slot_mapping.shape), _INT),
        }
    )
    width = k_cache.shape[2] * k_cache.shape[3]
    block = min(triton.next_power_of_2(width), 1024)
    if num_requests:
        _compact_kv_kernel[(num_requests, triton.cdiv(width, block))](
            k_cache, v_cache, path, num_sampled, first_row, slot_mapping, block_stride, slot_stride, k_cache.shape[1], width, path_width,
            BLOCK=block,
        )  # fmt: skip
