"""AttentionMetadata and the paged KV cache: all that a layer needs to attend, passed by argument, never ambient.

Owns: the attention seam between runner, models and draft heads. Must not know: requests or proposers.
Letters: R requests, N query rows, B blocks per request.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import TypeAlias

import torch

KVPair: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # each [num_blocks, block_size, num_kv_heads, head_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where each query row's keys lie.

    cu_query_lens [R+1] int32, seq_lens [R] int32 (context + query), block_table [R, B] int32, slot_mapping [N] int64.
    tree_mask: None for chains (causal inside the query), else [N, Q] bool with Q the longest query: row n may attend
    the j-th query row of its own request. is_causal False: every query row sees the whole query (block drafters).
    """

    cu_query_lens: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_lens_cpu: tuple[int, ...]
    seq_lens_cpu: tuple[int, ...]
    tree_mask: torch.Tensor | None = None
    is_causal: bool = True


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
