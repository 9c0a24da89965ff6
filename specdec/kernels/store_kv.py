"""Triton: scatter new keys and values into the paged cache. Semantics: reference_layers.store_kv.

Owns: one kernel, one program per query row. Must not know: requests. Read next: paged_attention.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec.kernels.cache_layout import check_caches


@triton.jit
def _store_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_row_stride, v_row_stride, block_stride, slot_stride, BLOCK_SIZE, WIDTH,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per (row, block of Hkv * Dh). A negative slot is padding and writes nothing."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < tl.where(slot >= 0, WIDTH, 0)
    target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride + offsets
    k = tl.load(k_ptr + row * k_row_stride + offsets, mask=inside)
    v = tl.load(v_ptr + row * v_row_stride + offsets, mask=inside)
    tl.store(k_cache_ptr + target, k.to(k_cache_ptr.dtype.element_ty), mask=inside)
    tl.store(v_cache_ptr + target, v.to(v_cache_ptr.dtype.element_ty), mask=inside)


def store_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """As reference_layers.store_kv; k and v may be slices of a fused projection, gaps between rows allowed.

    Raises:
        ValueError: shapes or layouts disagree.
    """
    block_stride, slot_stride = check_caches(k_cache, v_cache)
    num_rows, num_heads, head_dim = k.shape
    if k.shape != v.shape or (num_heads, head_dim) != tuple(k_cache.shape[2:]) or tuple(slot_mapping.shape) != (num_rows,):
        raise ValueError(
            f"k has shape {tuple(k.shape)}, v {tuple(v.shape)}, slot_mapping {tuple(slot_mapping.shape)}, but the cache holds "
            f"{tuple(k_cache.shape[2:])} per slot: k and v must be [N, kv_heads, head_dim] with one slot per row"
        )
    for name, rows in (("k", k), ("v", v)):
        if rows.stride(2) != 1 or rows.stride(1) != head_dim:
            raise ValueError(f"{name} has strides {rows.stride()}, but the heads of a row must lie without gaps")
    width = num_heads * head_dim
    block = min(triton.next_power_of_2(width), 1024)
    if num_rows:
        _store_kv_kernel[(num_rows, triton.cdiv(width, block))](
            k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0), block_stride, slot_stride, k_cache.shape[1], width, BLOCK=block
        )  # fmt: skip
