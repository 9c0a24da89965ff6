"""The small operators between two linears of a decoder layer, in vectorised torch.

Owns: the CPU column of rms_norm, add_rms_norm, rope_store, silu_mul, paged_attention. Semantics: kernels/reference.py.
Letters: N query rows, Hq query heads, Hkv KV heads, Dh head dim.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension of x [..., H] in float32 and scale by weight [H]; x's dtype comes back."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual), all [N, H]."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up for gate_up [N, 2I] = [gate | up]; the result is [N, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [N, heads, Dh] by the angles of its rows, cos and sin [N, Dh/2] float32, half-rotation layout."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def store_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Scatter k and v [N, Hkv, Dh] into caches [num_blocks, block_size, Hkv, Dh] at flat slots [N]; a negative slot writes nothing."""
    written = slot_mapping >= 0
    if not written.all():  # torch would count such slots from the end of the cache
        k, v, slot_mapping = k[written], v[written], slot_mapping[written]
    k_cache.view(-1, *k_cache.shape[2:])[slot_mapping] = k
    v_cache.view(-1, *v_cache.shape[2:])[slot_mapping] = v


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
    """Attend query [N, Hq, Dh] to each request's cached keys; returns [N, Hq, Dh].

    The query rows of a request are the last query_len positions of its sequence. tree_mask [N, Q] replaces causality
    inside the query; window keeps the last `window` positions only, which are counted by depth in a tree. device_lens: the exact
    lengths, where the host's are bounds.
    """
    if device_lens is not None:
        query_lens, seq_lens = tuple(device_lens[0].diff().tolist()), tuple(device_lens[1].tolist())
    out = torch.empty_like(query)
    block_size = k_cache.shape[1]
    start = 0
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        rows = slice(start, start + query_len)
        blocks = block_table[request, : -(-seq_len // block_size)].long()
        keys = k_cache[blocks].flatten(0, 1)[:seq_len].transpose(0, 1)  # [Hkv, S, Dh]
        values = v_cache[blocks].flatten(0, 1)[:seq_len].transpose(0, 1)
        mask = _mask(
            query_len, seq_len, is_causal=is_causal, tree=None if tree_mask is None else tree_mask[rows, :query_len], window=window
        )
        out[rows] = _grouped_attention(query[rows].transpose(0, 1), keys, values, mask=mask, scale=scale).transpose(0, 1)
        start += query_len
    return out


def _grouped_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """query [Hq, Q, Dh] against keys, values [Hkv, S, Dh]: rows of one group share their keys, so K and V are read once."""
    num_heads, query_len, head_dim = query.shape
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    if query_len > 64:  # prefill: the flash kernel of torch, which needs equal head counts
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        return F.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask, scale=scale)[0]
    packed = query.reshape(num_kv_heads, group * query_len, head_dim)
    packed_mask = None if mask is None else mask.repeat(group, 1)[None]
    return F.scaled_dot_product_attention(packed, keys, values, attn_mask=packed_mask, scale=scale).view(num_heads, query_len, head_dim)


def _mask(query_len: int, seq_len: int, *, is_causal: bool, tree: torch.Tensor | None, window: int | None) -> torch.Tensor | None:
    """[Q, S] bool of what each row may see, or None for everything."""
    if query_len == 1 and window is None:
        return None
    if not is_causal and tree is None and window is None:
        return None
    context = seq_len - query_len
    position = torch.arange(context, seq_len)[:, None]
    key = torch.arange(seq_len)[None]
    mask = key <= position if is_causal else torch.ones(query_len, seq_len, dtype=torch.bool)
    if tree is not None:
        mask[:, context:] = tree
    if window is not None:
        if tree is not None:
            position = context + tree.sum(-1, keepdim=True) - 1  # the anchor's plus the depth, wherever the slot lies
            key = torch.cat((key[:, :context], position.T), dim=1)
        mask &= key > position - window
    return mask
