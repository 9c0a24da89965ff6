"""Triton: standard p/q verification of chains. Semantics: reference.rejection_sample; mathematics: rules.STANDARD.

Owns: the accept kernel. Must not know: how laws are stored (draft_law.py) or the residual drawn (recover.py).
Read next: block_verify.py, the joint rule on the same inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec.kernels.device import philox_uniform
from specdec.kernels.draft_law import chain_inputs
from specdec.kernels.recover import num_tested, recover
from specdec.kernels.verified import Verified


@triton.jit
def native_yes(probs_ptr, draft_ptr, q_ptr, seed, position, request, start, i, V, K):
    """Whether draft i passes the p/q test: u q(d) < p(d), never where q(d) is 0."""
    draft = tl.load(draft_ptr + request * K + i)
    p = tl.load(probs_ptr + (start + i).to(tl.int64) * V + tl.maximum(draft, 0))
    q = tl.load(q_ptr + request * K + i)
    return (draft >= 0) & (q > 0.0) & (philox_uniform(seed, position, 2, i) * q < p)


@triton.jit
def _accept_kernel(probs_ptr, draft_ptr, q_ptr, cu_num_logits_ptr, seed_ptr, position_ptr, kept_ptr, valid_ptr, V, K):
    """One program per request: count the leading drafts that pass."""
    request = tl.program_id(0).to(tl.int64)
    start, _, num_valid = num_tested(draft_ptr, cu_num_logits_ptr, request, K)
    seed = tl.load(seed_ptr + request)
    position = tl.load(position_ptr + request)
    kept = tl.full([], 0, tl.int32)
    is_alive = num_valid > 0
    for i in range(num_valid):
        is_alive = is_alive & native_yes(probs_ptr, draft_ptr, q_ptr, seed, position, request, start, i, V, K)
        kept += is_alive.to(tl.int32)
    tl.store(kept_ptr + request, kept)
    tl.store(valid_ptr + request, num_valid)


def rejection_sample(
    target_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    *,
    cu_num_logits: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    draft_ids: torch.Tensor | None = None,
    one_hot: torch.Tensor | None = None,
) -> Verified:
    """As reference.rejection_sample, with target_probs in float32."""
    inputs = chain_inputs(
        target_probs,
        draft_token_ids,
        cu_num_logits=cu_num_logits,
        seed=seed,
        position=position,
        draft_logits=draft_logits,
        draft_ids=draft_ids,
        one_hot=one_hot,
    )
    kept = torch.zeros(inputs.num_requests, dtype=torch.int32, device=seed.device)
    num_valid = torch.zeros_like(kept)
    if inputs.num_requests:
        _accept_kernel[(inputs.num_requests,)](
            target_probs, draft_token_ids, inputs.q, cu_num_logits, seed, position, kept, num_valid, inputs.vocab, inputs.num_drafts,
            num_warps=1,
        )  # fmt: skip
    return recover(inputs, kept=kept, num_valid=num_valid, weight=torch.ones_like(kept, dtype=torch.float32))
