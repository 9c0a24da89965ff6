"""The paged cache as kernels see it: [num_blocks, block_size, Hkv, Dh], a slot's entries without gaps, any block stride.

Owns: the check of that layout. Must not know: who writes or reads. Read next: store_kv.py.
"""

from __future__ import annotations

import torch

from specdec.kernels.checks import FLOATING


def check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[int, int]:
    """Return (block stride, slot stride) in elements, the same for both caches.

    Raises:
        ValueError: shapes, dtypes or strides of the two caches differ, or a slot has gaps.
    """
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"k_cache has shape {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}, "
            "but both must be [num_blocks, block_size, kv_heads, head_dim]"
        )
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in FLOATING:
        raise ValueError(f"k_cache is {k_cache.dtype} and v_cache {v_cache.dtype}, but both must be one of {FLOATING}")
    head_dim = k_cache.shape[3]
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride(3) != 1 or cache.stride(2) != head_dim or cache.stride() != k_cache.stride():
            raise ValueError(f"{name} has strides {cache.stride()}, but heads of a slot must lie without gaps, alike in both caches")
    return k_cache.stride(0), k_cache.stride(1)
