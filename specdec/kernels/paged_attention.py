"""Triton: attention of variable-length queries over the paged cache. Semantics: reference_layers.paged_attention.

Owns: three kernels: one pass over all keys; the same over a share of the keys, for few queries with long contexts; and the
merge of shares. Must not know: layers or requests. Read next: norm_rope.py.

Query heads that share a KV head are packed into one tile with the query rows, so that a request of k+1 rows and G heads per
group reads each key once for (k+1) * G rows: verifying drafts costs the memory traffic of one token.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specdec.kernels.cache_layout import check_caches

KEYS_PER_SHARE = 512  # least number of keys for which another program is worth its merge
MAX_SHARES = 16


@triton.jit
def attend_keys(
    q, j, is_row, tree_row_ptr, depth_ptr, k_ptr, v_ptr, block_row_ptr, begin, end, context, block_stride, slot_stride, scale, window,
    BLOCK_SIZE, D,
    IS_CAUSAL: tl.constexpr, HAS_TREE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(sum of weighted values, largest score, sum of weights) of a tile of query rows over keys begin .. end-1.

    q [BLOCK_M, BLOCK_D]; j [BLOCK_M] index of each row inside its query; tree_row_ptr [BLOCK_M] its row of the tree mask;
    depth_ptr: depths of the request's query rows, read where both a tree and a window are given.
    """
    d = tl.arange(0, BLOCK_D)
    place = context + j
    if HAS_TREE and HAS_WINDOW:
        place = context + tl.load(depth_ptr + j, mask=is_row, other=0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        inside = at < end
        block = tl.load(block_row_ptr + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        entry = block * block_stride + (at % BLOCK_SIZE) * slot_stride
        k = tl.load(k_ptr + entry[None, :] + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        visible = inside[None, :] & is_row[:, None]
        if HAS_TREE:
            column = at - context
            seen = tl.load(tree_row_ptr[:, None] + column[None, :], mask=visible & (column >= 0)[None, :], other=1)
            visible = visible & (seen != 0)
        elif IS_CAUSAL:
            visible = visible & (at[None, :] <= context + j[:, None])
        if HAS_WINDOW:
            key_place = at
            if HAS_TREE:
                key_place = tl.where(at < context, at, context + tl.load(depth_ptr + at - context, mask=inside & (at >= context), other=0))
            visible = visible & (key_place[None, :] > place[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(peak - base)
        v = tl.load(v_ptr + entry[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, axis=1)
        peak = higher
    return acc, peak, total


@triton.jit
def _paged_attention_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, tree_ptr, depth_ptr, cu_query_lens_ptr, seq_lens_ptr, block_table_ptr, out_ptr,
    q_row_stride, q_head_stride, tree_stride, block_stride, slot_stride, scale, window, HQ, B, BLOCK_SIZE, D,
    GROUP: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_TREE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program per (request, KV head, tile of query rows); a tile past the request's rows does nothing."""
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    first_row = tl.load(cu_query_lens_ptr + request)
    query_len = tl.load(cu_query_lens_ptr + request + 1) - first_row
    tile = tl.program_id(2) * (BLOCK_M // GROUP)
    if tile < query_len:
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        j = tile + m // GROUP
        is_row = (m < (BLOCK_M // GROUP) * GROUP) & (j < query_len)
        row = (first_row + j).to(tl.int64)
        head = kv_head * GROUP + m % GROUP
        inside = is_row[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + (row * q_row_stride + head * q_head_stride)[:, None] + d[None, :], mask=inside, other=0.0)
        seq_len = tl.load(seq_lens_ptr + request)
        context = seq_len - query_len
        end = seq_len
        if IS_CAUSAL and not HAS_TREE:
            end = tl.minimum(seq_len, context + tile + BLOCK_M // GROUP)
        begin = tile * 0
        if HAS_WINDOW:
            first_depth = tile if not HAS_TREE else tile * 0  # rows of a tree lie at any depth
            begin = tl.maximum(context + first_depth - window + 1, 0) // BLOCK_N * BLOCK_N
        acc, _, total = attend_keys(
            q, j, is_row, tree_ptr + row * tree_stride, depth_ptr + first_row, k_cache_ptr + kv_head * D, v_cache_ptr + kv_head * D,
            block_table_ptr + request.to(tl.int64) * B, begin, end, context, block_stride, slot_stride, scale, window, BLOCK_SIZE, D,
            IS_CAUSAL, HAS_TREE, HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out_ptr + ((row * HQ + head) * D)[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _attention_share_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, tree_ptr, depth_ptr, cu_query_lens_ptr, seq_lens_ptr, block_table_ptr, acc_ptr, peak_ptr, total_ptr,
    q_row_stride, q_head_stride, tree_stride, block_stride, slot_stride, scale, window, N, HQ, B, BLOCK_SIZE, D, TILES,
    GROUP: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_TREE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """One program per (request, KV head, share of the keys and tile of query rows); writes partial sums [SHARES, N, Hq, ...]."""
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    share = tl.program_id(2) // TILES
    first_row = tl.load(cu_query_lens_ptr + request)
    query_len = tl.load(cu_query_lens_ptr + request + 1) - first_row
    tile = (tl.program_id(2) % TILES) * (BLOCK_M // GROUP)
    if tile < query_len:
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        j = tile + m // GROUP
        is_row = (m < (BLOCK_M // GROUP) * GROUP) & (j < query_len)
        row = (first_row + j).to(tl.int64)
        head = kv_head * GROUP + m % GROUP
        inside = is_row[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + (row * q_row_stride + head * q_head_stride)[:, None] + d[None, :], mask=inside, other=0.0)
        seq_len = tl.load(seq_lens_ptr + request)
        per_share = tl.cdiv(tl.cdiv(seq_len, SHARES), BLOCK_N) * BLOCK_N
        begin = share * per_share
        acc, peak, total = attend_keys(
            q, j, is_row, tree_ptr + row * tree_stride, depth_ptr + first_row, k_cache_ptr + kv_head * D, v_cache_ptr + kv_head * D,
            block_table_ptr + request.to(tl.int64) * B, begin, tl.minimum(seq_len, begin + per_share), seq_len - query_len,
            block_stride, slot_stride, scale, window, BLOCK_SIZE, D, IS_CAUSAL, HAS_TREE, HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        at = (share.to(tl.int64) * N + row) * HQ + head
        tl.store(peak_ptr + at, peak, mask=is_row)
        tl.store(total_ptr + at, total, mask=is_row)
        tl.store(acc_ptr + (at * D)[:, None] + d[None, :], acc, mask=inside)


@triton.jit
def _merge_shares_kernel(acc_ptr, peak_ptr, total_ptr, out_ptr, ROWS, D, SHARES: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program per (query row, head): scale every share to the largest score, add, divide once."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    highest = tl.full([], float("-inf"), tl.float32)
    for share in range(SHARES):
        highest = tl.maximum(highest, tl.load(peak_ptr + share * ROWS + row))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    acc = tl.zeros([BLOCK_D], tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for share in range(SHARES):
        scale = tl.exp(tl.load(peak_ptr + share * ROWS + row) - base)
        acc += scale * tl.load(acc_ptr + (share * ROWS + row) * D + d, mask=d < D, other=0.0)
        total += scale * tl.load(total_ptr + share * ROWS + row)
    out = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


def paged_attention(
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
    """As reference_layers.paged_attention; the number of shares follows the load of the device."""
    num_shares = 1
    if query.is_cuda and query_lens:
        programs = len(query_lens) * k_cache.shape[2] * triton.cdiv(max(query_lens), 16)
        num_shares = min(_processors(query.device) * 2 // max(programs, 1), max(seq_lens) // KEYS_PER_SHARE, MAX_SHARES)
    return shared_attention(
        query,
        k_cache,
        v_cache,
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_table=block_table,
        scale=scale,
        is_causal=is_causal,
        tree_mask=tree_mask,
        window=window,
        device_lens=device_lens,
        num_shares=1 if num_shares < 2 else 2 ** (num_shares.bit_length() - 1),
    )


def shared_attention(
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
    num_shares: int = 1,
) -> torch.Tensor:
    """paged_attention with the keys of each request cut into num_shares parts that run side by side; 1 is a single pass.

    Raises:
        ValueError: shapes, dtypes or layouts disagree, or lengths that the block table cannot hold.
    """
    block_stride, slot_stride = check_caches(k_cache, v_cache)
    _check_query(query, k_cache, query_lens=query_lens, seq_lens=seq_lens, block_table=block_table, tree_mask=tree_mask)
    num_rows, num_heads, head_dim = query.shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not num_rows:
        return out
    cu_query_lens, lengths = device_lens or _on_device(query_lens, seq_lens, query.device)
    shape = _tile(num_heads // k_cache.shape[2], max(query_lens), head_dim)
    tiles = triton.cdiv(max(query_lens), shape.rows)
    tree = block_table if tree_mask is None else tree_mask.view(torch.uint8)
    depths = cu_query_lens if tree_mask is None or window is None else tree_mask.sum(-1, dtype=torch.int32) - 1
    inputs = (query, k_cache, v_cache, tree, depths, cu_query_lens, lengths, block_table)
    strides = (query.stride(0), query.stride(1), 0 if tree_mask is None else tree_mask.stride(0), block_stride, slot_stride)
    constants = {
        "GROUP": num_heads // k_cache.shape[2], "IS_CAUSAL": is_causal, "HAS_TREE": tree_mask is not None,
        "HAS_WINDOW": window is not None, "BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n, "BLOCK_D": shape.block_d,
    }  # fmt: skip
    sizes = (num_heads, block_table.shape[1], k_cache.shape[1], head_dim)
    grid = (len(query_lens), k_cache.shape[2], tiles * num_shares)
    if num_shares == 1:
        _paged_attention_kernel[grid](*inputs, out, *strides, scale, window or 0, *sizes, **constants)
        return out
    partial = torch.empty((num_shares, num_rows, num_heads, head_dim), dtype=torch.float32, device=query.device)
    peak, total = torch.empty((2, num_shares, num_rows, num_heads), dtype=torch.float32, device=query.device)
    _attention_share_kernel[grid](
        *inputs, partial, peak, total, *strides, scale, window or 0, num_rows, *sizes, tiles, SHARES=num_shares, **constants
    )  # fmt: skip
    _merge_shares_kernel[(num_rows * num_heads,)](
        partial, peak, total, out, num_rows * num_heads, head_dim, SHARES=num_shares, BLOCK_D=shape.block_d, num_warps=1
    )  # fmt: skip
    return out


class _Tile(NamedTuple):
    block_m: int
    block_n: int
    block_d: int
    rows: int


def _tile(group: int, longest: int, head_dim: int) -> _Tile:
    """Tile sizes; a matrix unit wants at least 16 rows. Chosen by shared memory at head_dim 128, not yet tuned on a device."""
    block_m = min(max(triton.next_power_of_2(longest * group), triton.next_power_of_2(group), 16), max(64, triton.next_power_of_2(group)))
    block_d = max(triton.next_power_of_2(head_dim), 16)
    return _Tile(block_m, 64 if block_d <= 128 else 32, block_d, block_m // group)


@lru_cache(maxsize=8)
def _on_device(query_lens: tuple[int, ...], seq_lens: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(cu_query_lens [R+1], seq_lens [R]) int32 on the device, copied once a step rather than once a layer."""
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    return torch.tensor(starts, dtype=torch.int32, device=device), torch.tensor(seq_lens, dtype=torch.int32, device=device)


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check_query(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    *,
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    block_table: torch.Tensor,
    tree_mask: torch.Tensor | None,
) -> None:
    num_rows, num_heads, head_dim = query.shape
    if query.dtype != k_cache.dtype or head_dim != k_cache.shape[3] or num_heads % k_cache.shape[2] or query.stride(2) != 1:
        raise ValueError(
            f"query is {query.dtype} {tuple(query.shape)} with strides {query.stride()}, but the cache is {k_cache.dtype} "
            f"{tuple(k_cache.shape)}: dtype and head_dim must agree, and query heads must be a multiple of KV heads"
        )
    if sum(query_lens) != num_rows or len(query_lens) != len(seq_lens) or len(seq_lens) != block_table.shape[0]:
        raise ValueError(
            f"query has {num_rows} rows, query_lens {query_lens}, seq_lens {seq_lens} and block_table {block_table.shape[0]} rows, "
            "but they must describe the same requests and rows"
        )
    room = block_table.shape[1] * k_cache.shape[1]
    if any(query_len > seq_len or seq_len > room for query_len, seq_len in zip(query_lens, seq_lens, strict=True)):
        raise ValueError(f"seq_lens {seq_lens} must be at least query_lens {query_lens} and at most the block table's {room} slots")
    if block_table.dtype != torch.int32 or not block_table.is_contiguous():
        raise ValueError(f"block_table is {block_table.dtype} with strides {block_table.stride()}, but it must be contiguous int32")
    if tree_mask is not None and (
        tree_mask.dtype != torch.bool or tree_mask.shape[0] != num_rows or tree_mask.shape[1] < max(query_lens) or tree_mask.stride(1) != 1
    ):
        raise ValueError(
            f"tree_mask is {tree_mask.dtype} {tuple(tree_mask.shape)}, but it must be bool [{num_rows}, at least {max(query_lens)}]"
        )
