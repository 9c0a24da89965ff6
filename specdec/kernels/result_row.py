"""Triton: how a chain's result is written: one row of tokens, one of row offsets, four counts. Layout: verified.py.

Owns: the device function `write_row` and its buffers. Must not know: rules. Read next: recover.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec.kernels.verified import INVALID_TOKEN


@triton.jit
def write_row(draft_ptr, tokens_ptr, path_ptr, counts_ptr, request, kept, token, num_drafts, R, K, WIDTH_BLOCK: tl.constexpr):
    """Write one request's result: kept drafts, the token after them, and the counts; a token of -1 fails the request."""
    depths = tl.arange(0, WIDTH_BLOCK)
    drafts = tl.load(draft_ptr + request * K + depths, mask=depths < tl.maximum(num_drafts, 0), other=-1)
    row = tl.where(depths < kept, drafts, tl.where(depths == kept, token, -1))
    inside = depths < K + 1
    has_failed = token < 0
    tl.store(tokens_ptr + request * (K + 1) + depths, tl.where(has_failed, -1, row), mask=inside)
    tl.store(path_ptr + request * (K + 1) + depths, tl.where(has_failed | (depths > kept), -1, depths).to(tl.int64), mask=inside)
    count = tl.where(has_failed, 0, kept + 1).to(tl.int64)
    num_nodes = tl.maximum(num_drafts, 0).to(tl.int64)
    num_invalid = tl.sum(((depths < num_drafts) & (drafts < 0)).to(tl.int64), axis=0)
    tl.store(counts_ptr + request, count)
    tl.store(counts_ptr + R + request, num_nodes - tl.maximum(count - 1, 0))
    tl.store(counts_ptr + 2 * R + request, num_nodes - num_invalid)
    tl.store(counts_ptr + 3 * R + request, num_invalid)


def empty_result(num_requests: int, num_drafts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Buffers for R requests of at most K drafts: tokens and path [R, K+1] filled with -1, counts [4, R] zero."""
    tokens = torch.full((num_requests, num_drafts + 1), INVALID_TOKEN, dtype=torch.int64, device=device)
    return tokens, torch.full_like(tokens, INVALID_TOKEN), torch.zeros((4, num_requests), dtype=torch.int64, device=device)
