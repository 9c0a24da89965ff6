"""paged_attention by torch's scaled_dot_product_attention: keys are gathered from their blocks, queries laid out in a rectangle.

Owns: that layout and its mask. Must not know: layers or requests. Semantics: reference_layers.paged_attention.
For comparing with, and for devices on which our kernels are in doubt: gathering costs a copy of all keys and values that are read.
Letters: R requests, N query rows, Q longest query, S longest sequence in whole blocks, Hq/Hkv heads, Dh head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from specdec.kernels.attention.backends import Attend
from specdec.kernels.cache_layout import check_caches


class _Layout(NamedTuple):
    """starts [R] first query row, query_lens [R], seq_lens [R]; offsets [Q]; keys [S]: places of the rectangle."""

    starts: torch.Tensor
    query_lens: torch.Tensor
    seq_lens: torch.Tensor
    offsets: torch.Tensor
    keys: torch.Tensor

    @property
    def context(self) -> torch.Tensor:
        return self.seq_lens - self.query_lens


def make_backend() -> Attend:
    """It keeps nothing from call to call."""
    return paged_attention


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
    """As reference_layers.paged_attention, on any device."""
    check_caches(k_cache, v_cache)
    if not len(query):
        return torch.empty_like(query)
    block_size = k_cache.shape[1]
    num_blocks = -(-max(seq_lens) // block_size)
    layout = _layout(query_lens, seq_lens, device_lens, num_keys=num_blocks * block_size, device=query.device)
    blocks = block_table[:, :num_blocks].long()
    keys = k_cache[blocks].flatten(1, 2)  # [R, S, Hkv, Dh]
    beyond = layout.keys >= layout.seq_lens[:, None]
    keys, values = (x.masked_fill(beyond[:, :, None, None], 0) for x in (keys, v_cache[blocks].flatten(1, 2)))  # a masked NaN stays NaN
    rows = (layout.starts[:, None] + layout.offsets).clamp(max=len(query) - 1)  # [R, Q]
    mask = _mask(layout, rows, is_causal=is_causal, tree_mask=tree_mask, window=window)
    attended = F.scaled_dot_product_attention(
        query[rows].transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask[:, None], scale=scale, enable_gqa=True
    )
    return _rows_of(attended.transpose(1, 2), layout, len(query))


def _layout(
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    device_lens: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    num_keys: int,
    device: torch.device,
) -> _Layout:
    if device_lens is None:
        lens = torch.tensor(query_lens, device=device)
        starts, ends = lens.cumsum(0) - lens, torch.tensor(seq_lens, device=device)
    else:
        starts, lens, ends = device_lens[0][:-1].long(), device_lens[0].diff().long(), device_lens[1].long()
    return _Layout(starts, lens, ends, torch.arange(max(query_lens), device=device), torch.arange(num_keys, device=device))


def _mask(layout: _Layout, rows: torch.Tensor, *, is_causal: bool, tree_mask: torch.Tensor | None, window: int | None) -> torch.Tensor:
    """[R, Q, S] bool of what each query row may see. A place without a row sees the first key, since a row without any would be NaN."""
    context, keys = layout.context[:, None, None], layout.keys[None, None]
    places = context + layout.offsets[None, :, None]  # [R, Q, 1] index of each row
    visible = (keys < layout.seq_lens[:, None, None]).expand(-1, len(layout.offsets), -1)
    key_places = keys
    if tree_mask is not None:
        column = (keys - context).clamp(0, tree_mask.shape[1] - 1).expand(visible.shape)
        visible = visible & ((keys < context) | tree_mask[rows].gather(2, column))
        depths = tree_mask.sum(-1)[rows] - 1  # [R, Q]
        places = context + depths[:, :, None]
        within = (keys - context)[:, 0].clamp(0, len(layout.offsets) - 1)  # [R, S]
        key_places = torch.where(keys < context, keys, context + depths.gather(1, within)[:, None])
    elif is_causal:
        visible = visible & (keys <= places)
    if window is not None:
        visible = visible & (key_places > places - window)
    is_row = (layout.offsets < layout.query_lens[:, None])[:, :, None]
    return torch.where(is_row, visible, keys == 0)


def _rows_of(attended: torch.Tensor, layout: _Layout, num_rows: int) -> torch.Tensor:
    """[R, Q, Hq, Dh] -> [N, Hq, Dh]; rows past the last request's get some row's values."""
    row = torch.arange(num_rows, device=attended.device)
    owner = torch.searchsorted(layout.starts + layout.query_lens, row, right=True).clamp(max=len(layout.starts) - 1)
    return attended[owner, (row - layout.starts[owner]).clamp(max=attended.shape[1] - 1)]
