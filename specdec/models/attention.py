"""AttentionMetadata and the paged KV cache: all that a layer needs to attend, passed by argument, never ambient.

Owns: the attention seam between runner, models and draft heads. Must not know: requests or proposers.
Letters: R requests, N query rows, B blocks per request.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

Attend: TypeAlias = Callable[..., torch.Tensor]  # paged_attention of kernels/reference_layers.py, whoever computes it
KVPair: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # each [num_blocks, block_size, num_kv_heads, head_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where each query row's keys lie.

    cu_query_lens [R+1] int32, seq_lens [R] int32 (context + query), block_table [R, B] int32, slot_mapping [N] int64.
    tree_mask: None for chains (causal inside the query), else [N, Q] bool with Q the longest query: row n may attend
    the j-th query row of its own request. is_causal False: every query row sees the whole query (block drafters).
    Lengths that end in _cpu are bounds where a device runs behind the host or replays a capture, else the same numbers.
    paged_attention: the backend that was asked for, None for the device's own.
    """

    cu_query_lens: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_lens_cpu: tuple[int, ...]
    seq_lens_cpu: tuple[int, ...]
    tree_mask: torch.Tensor | None = None
    is_causal: bool = True
    paged_attention: Attend | None = None

    @property
    def device_lens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The lengths as a device has them, which are exact."""
        return self.cu_query_lens, self.seq_lens


def allocate_kv(num_layers: int, shape: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device) -> list[KVPair]:
    """Allocate one (K, V) pair per layer; shape is [num_blocks, block_size, num_kv_heads, head_dim].

    The cache is zeroed: a padding slot is read by nobody, but NaN bits in it would survive a masked product.
    """
    return [(_zeros(shape, dtype, device), _zeros(shape, dtype, device)) for _ in range(num_layers)]


def _zeros(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU the zero pages of an anonymous mapping: memory is taken only when a block is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)


def release_kv(kv: Sequence[KVPair]) -> None:
    """Give the memory of caches from `allocate_kv` back to the system, keeping the tensors. What they held is lost; on a GPU they may
    not be touched before `restore_kv`."""
    for cache in (cache for pair in kv for cache in pair):
        if cache.device.type != "cpu":
            cache.untyped_storage().resize_(0)
        elif not _drop_pages(cache):
            cache.zero_()


def restore_kv(kv: Sequence[KVPair]) -> None:
    """Make caches usable after `release_kv`: zeroed, as they were first. A CPU takes the pages when blocks are written."""
    for cache in (cache for pair in kv for cache in pair):
        if cache.device.type != "cpu":
            cache.untyped_storage().resize_(cache.numel() * cache.element_size())
            cache.zero_()


def _drop_pages(cache: torch.Tensor) -> bool:
    """Punch out the pages of a shared anonymous mapping, so that they read as zeros again. False: this system cannot."""
    if sys.platform != "linux":
        return False
    remove = 9  # MADV_REMOVE: other advice leaves the pages of a shared mapping in memory
    libc = ctypes.CDLL(None, use_errno=True)
    address, num_bytes = ctypes.c_void_p(cache.data_ptr()), ctypes.c_size_t(cache.numel() * cache.element_size())
    return bool(libc.madvise(address, num_bytes, remove) == 0)


def build_tree_mask(parents: list[list[int]], query_lens: list[int]) -> torch.Tensor:
    """Return the [N, Q] mask of ancestors. parents[r] lists each draft node's parent node (-1: the anchor).

    The draft nodes are the last len(parents[r]) rows of the request's query; rows before them are a chain.
    """
    longest = max(query_lens)
    mask = torch.zeros(sum(query_lens), longest, dtype=torch.bool)
    start = 0
    for nodes, query_len in zip(parents, query_lens, strict=True):
        num_chain = query_len - len(nodes)
        rows = mask[start : start + query_len]
        rows[:num_chain, :num_chain] = torch.ones(num_chain, num_chain, dtype=torch.bool).tril()
        for node, parent in enumerate(nodes):
            above = num_chain - 1 if parent < 0 else num_chain + parent
            rows[num_chain + node] = rows[above]
            rows[num_chain + node, num_chain + node] = True
        start += query_len
    return mask
