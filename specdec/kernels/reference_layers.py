"""What the operators of a decoder layer mean: norms, rotation, gated activation, the paged cache and attention over it.

Owns: the only copy of these semantics, float64 inside. Must not know: weights, models, speed. Read next: reference_state.py.
Letters: N query rows, R requests, Hq query heads, Hkv KV heads, Dh head dim, I width of the MLP.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x [..., H] divided by the root of its mean square (plus eps) and scaled by weight [H], in x's dtype."""
    wide = x.double()
    normed = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.double()).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(sum), sum) with sum = x + residual rounded to their dtype, all [N, H]. The inputs stay as they are."""
    total = (x.double() + residual.double()).to(x.dtype)
    return rms_norm(total, weight, eps), total


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + Dh/2) of x [N, heads, Dh] by its row's angle; cos and sin are [N, Dh/2] float32."""
    first, second = x.double().chunk(2, dim=-1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gate * sigmoid(gate) * up for gate_up [N, 2I] = [gate | up], as [N, I]."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def store_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write k and v [N, Hkv, Dh] into caches [num_blocks, block_size, Hkv, Dh] at slots [N] int64; a negative slot writes nothing."""
    block_size = k_cache.shape[1]
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_cache[slot // block_size, slot % block_size] = k[row]
            v_cache[slot // block_size, slot % block_size] = v[row]


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
    """Attend query [N, Hq, Dh] to the cached keys of its own request; returns [N, Hq, Dh] in query's dtype.

    Args:
        k_cache, v_cache: [num_blocks, block_size, Hkv, Dh]; the query rows' own keys are already stored.
        query_lens, seq_lens: per request; the query rows are the last query_len of its seq_len positions.
        block_table: [R, B] int32. scale multiplies the scores. Query head h reads KV head h // (Hq / Hkv).
        is_causal: a row sees keys up to its own; False: all keys of the request (block drafters).
        tree_mask: [N, Q] bool, Q >= the longest query. Row n sees all of the context and, inside the query, exactly
            the rows j with tree_mask[n, j], its ancestors and itself; is_causal is then not read. Columns past the
            request's own query are False.
        window: a row sees only the last `window` positions up to its own; None for all. In a tree a row's position is the
            context plus its number of ancestors, wherever its slot lies.
        device_lens: (cu_query_lens [R+1], seq_lens [R]) int32, where the host knows no more than bounds of both lengths. Rows past
            the last request's are padding, and what is returned for them is not to be read.
    """
    if device_lens is not None:
        query_lens, seq_lens = tuple(device_lens[0].diff().tolist()), tuple(device_lens[1].tolist())
    out = torch.empty_like(query)
    group = query.shape[1] // k_cache.shape[2]
    block_size, start = k_cache.shape[1], 0
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        blocks = block_table[request].long()
        slots = [int(blocks[at // block_size]) * block_size + at % block_size for at in range(seq_len)]
        keys = k_cache.flatten(0, 1)[slots].double()  # [seq_len, Hkv, Dh]
        values = v_cache.flatten(0, 1)[slots].double()
        for j in range(query_len):
            row = start + j
            visible = _visible(j, query_len, seq_len, is_causal=is_causal, tree_row=None if tree_mask is None else tree_mask[row])
            if window is not None:
                places = _places(query_len, seq_len, None if tree_mask is None else tree_mask[start : start + query_len])
                visible = [at for at in visible if places[at] > places[seq_len - query_len + j] - window]
            for head in range(query.shape[1]):
                scores = keys[visible, head // group] @ query[row, head].double() * scale
                out[row, head] = (torch.softmax(scores, dim=0) @ values[visible, head // group]).to(query.dtype)
        start += query_len
    return out


def _places(query_len: int, seq_len: int, tree: torch.Tensor | None) -> list[int]:
    """The position in the text of each key of a request: its index, but for tree rows the context plus their depth."""
    context = seq_len - query_len
    depths = range(query_len) if tree is None else [int(row.sum()) - 1 for row in tree]
    return [*range(context), *(context + depth for depth in depths)]


def _visible(j: int, query_len: int, seq_len: int, *, is_causal: bool, tree_row: torch.Tensor | None) -> list[int]:
    context = seq_len - query_len
    if tree_row is not None:
        return [*range(context), *(context + i for i in range(query_len) if bool(tree_row[i]))]
    return list(range(context + j + 1 if is_causal else seq_len))
