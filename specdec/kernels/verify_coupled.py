"""Triton: keep drafts while they equal the target's own samples, along chains and trees. Semantics: reference.py.

Owns: one kernel, one program per request. Must not know: how the samples were drawn. Read next: rejection_sample.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec.kernels.checks import check
from specdec.kernels.verified import INVALID_TOKEN, Verified

_INT = (torch.int64,)


@triton.jit
def _verify_coupled_kernel(
    target_ptr, draft_ptr, parents_ptr, cu_num_logits_ptr, tokens_ptr, path_ptr, counts_ptr,
    R, K, WIDTH, HAS_PARENTS: tl.constexpr, K_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request: hold all its drafts, and step from the anchor to the child that equals the target's sample."""
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + request)
    num_drafts = tl.load(cu_num_logits_ptr + request + 1) - start - 1
    nodes = tl.arange(0, K_BLOCK)
    is_draft = nodes < num_drafts
    drafts = tl.load(draft_ptr + request * K + nodes, mask=is_draft, other=-1)
    parents = nodes - 1
    if HAS_PARENTS:
        parents = tl.load(parents_ptr + request * K + nodes, mask=is_draft, other=-2).to(tl.int32)
    depths = tl.arange(0, WIDTH_BLOCK)
    tokens = tl.full([WIDTH_BLOCK], -1, tl.int64)
    path = tl.full([WIDTH_BLOCK], -1, tl.int64)
    node = tl.full([], -1, tl.int32)
    is_alive = num_drafts >= 0
    has_failed = num_drafts < 0
    count = tl.full([], 0, tl.int64)
    for depth in range(WIDTH):
        wanted = tl.load(target_ptr + start + node + 1, mask=is_alive, other=-1)
        tokens = tl.where((depths == depth) & is_alive, wanted, tokens)
        path = tl.where((depths == depth) & is_alive, node + 1, path)
        count += is_alive.to(tl.int64)
        has_failed = has_failed | (is_alive & (wanted < 0))
        child = tl.min(tl.where(is_draft & (parents == node) & (drafts == wanted) & (drafts >= 0), nodes, K_BLOCK), axis=0)
        is_alive = is_alive & (child < K_BLOCK)
        node = tl.where(is_alive, child, node)
    count = tl.where(has_failed, 0, count)
    inside = depths < WIDTH
    tl.store(tokens_ptr + request * WIDTH + depths, tl.where(has_failed, -1, tokens), mask=inside)
    tl.store(path_ptr + request * WIDTH + depths, tl.where(has_failed, -1, path), mask=inside)
    num_nodes = tl.maximum(num_drafts, 0).to(tl.int64)
    num_invalid = tl.sum((is_draft & (drafts < 0)).to(tl.int64), axis=0)
    tl.store(counts_ptr + request, count)
    tl.store(counts_ptr + R + request, num_nodes - tl.maximum(count - 1, 0))
    tl.store(counts_ptr + 2 * R + request, num_nodes - num_invalid)
    tl.store(counts_ptr + 3 * R + request, num_invalid)


def verify_coupled(
    target_token_ids: torch.Tensor,
    draft_token_ids: torch.Tensor,
    *,
    cu_num_logits: torch.Tensor,
    parents: torch.Tensor | None = None,
    max_depth: int | None = None,
) -> Verified:
    """As reference.verify_coupled."""
    num_requests, num_drafts = draft_token_ids.shape
    rules = {
        "draft_token_ids": (draft_token_ids, (num_requests, num_drafts), _INT),
        "target_token_ids": (target_token_ids, tuple(target_token_ids.shape), _INT),
        "cu_num_logits": (cu_num_logits, (num_requests + 1,), (torch.int32,)),
    }
    if parents is not None:
        rules["parents"] = (parents, (num_requests, num_drafts), _INT)
    device = check(rules)
    width = (num_drafts if max_depth is None else max_depth) + 1
    tokens = torch.full((num_requests, width), INVALID_TOKEN, dtype=torch.int64, device=device)
    path = torch.full_like(tokens, INVALID_TOKEN)
    counts = torch.zeros((4, num_requests), dtype=torch.int64, device=device)
    if num_requests:
        _verify_coupled_kernel[(num_requests,)](
            target_token_ids, draft_token_ids, draft_token_ids if parents is None else parents, cu_num_logits, tokens, path, counts,
            num_requests, num_drafts, width, HAS_PARENTS=parents is not None,
            K_BLOCK=triton.next_power_of_2(max(num_drafts, 1)), WIDTH_BLOCK=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip
    return Verified(tokens, path, *counts)
