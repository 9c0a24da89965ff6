"""Triton: joint verification of a chain. Semantics: reference.block_verify; mathematics: rules.BLOCK.

Owns: the weights, the residual masses, the last yes. Must not know: how the residual is drawn (recover.py).
Read next: lossy.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec.kernels.device import philox_uniform
from specdec.kernels.draft_law import ChainInputs, chain_inputs, load_draft_logits
from specdec.kernels.recover import num_tested, recover
from specdec.kernels.verified import Verified

BLOCK = 4096


@triton.jit
def _block_weight_kernel(probs_ptr, draft_ptr, q_ptr, cu_num_logits_ptr, weights_ptr, valid_ptr, V, K):
    """One program per request: w_i = min(1, w_{i-1} p(d_i) / q(d_i)), in float32 logs so that small ratios do not underflow."""
    request = tl.program_id(0).to(tl.int64)
    start, _, num_valid = num_tested(draft_ptr, cu_num_logits_ptr, request, K)
    log_weight = tl.full([], 0.0, tl.float32)
    tl.store(weights_ptr + request * (K + 1), 1.0)
    for i in range(num_valid):
        p = tl.load(probs_ptr + (start + i).to(tl.int64) * V + tl.load(draft_ptr + request * K + i))
        q = tl.load(q_ptr + request * K + i)
        is_possible = (p > 0.0) & (q > 0.0)
        step = tl.log(tl.where(is_possible, p, 1.0)) - tl.log(tl.where(is_possible, q, 1.0))
        log_weight = tl.where(is_possible, tl.minimum(log_weight + step, 0.0), float("-inf"))
        tl.store(weights_ptr + request * (K + 1) + i + 1, tl.exp(log_weight))
    tl.store(valid_ptr + request, num_valid)


@triton.jit
def _block_mass_kernel(
    probs_ptr, draft_ptr, logits_ptr, ids_ptr, one_hot_ptr, lse_ptr, cu_num_logits_ptr, valid_ptr, weights_ptr, mass_ptr, V, K, S,
    HAS_LAW: tl.constexpr, IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per (request, i >= 1): S_i, the sum of (w_i p - q)+ over the row after i drafts.

    Ids outside the draft law's support add w_i times the mass that p has there.
    """
    request = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) + 1
    if i < tl.load(valid_ptr + request):
        w = tl.load(weights_ptr + request * (K + 1) + i)
        row = request * K + i
        p_ptr = probs_ptr + (tl.load(cu_num_logits_ptr + request) + i).to(tl.int64) * V
        is_certain = True
        if HAS_LAW:
            is_certain = tl.load(one_hot_ptr + request) != 0
        if is_certain:
            mass = (w * (1.0 - tl.load(p_ptr + tl.load(draft_ptr + row)))).to(tl.float64)
        else:
            lse = tl.load(lse_ptr + row)
            mass = tl.full([], 0.0, tl.float64)
            covered = tl.full([], 0.0, tl.float64)
            for start in range(0, S, BLOCK):
                logits, ids = load_draft_logits(logits_ptr, ids_ptr, row, start + tl.arange(0, BLOCK), S, IDS)
                p = tl.load(p_ptr + ids, mask=ids >= 0, other=0.0)
                mass += tl.sum(tl.maximum(w * p - tl.exp(logits - lse), 0.0), axis=0).to(tl.float64)
                covered += tl.sum(p, axis=0).to(tl.float64)
            if IDS != 0:
                mass += w.to(tl.float64) * tl.maximum(1.0 - covered, 0.0)
        tl.store(mass_ptr + row, tl.maximum(mass, 0.0).to(tl.float32))


@triton.jit
def _block_accept_kernel(weights_ptr, mass_ptr, seed_ptr, position_ptr, valid_ptr, kept_ptr, weight_ptr, K):
    """One program per request: the last draft whose coin is below h_i = S_i / (S_i + 1 - w_i), or w_n for the last one."""
    request = tl.program_id(0).to(tl.int64)
    num_valid = tl.load(valid_ptr + request)
    seed = tl.load(seed_ptr + request)
    position = tl.load(position_ptr + request)
    kept = tl.full([], 0, tl.int32)
    for i in range(1, num_valid + 1):
        w = tl.load(weights_ptr + request * (K + 1) + i)
        mass = tl.load(mass_ptr + request * K + i, mask=i < num_valid, other=0.0)
        rest = mass + (1.0 - w)
        coin = tl.where(rest > 0.0, mass / tl.where(rest > 0.0, rest, 1.0), 1.0)
        coin = tl.where(i == num_valid, w, coin)
        kept = tl.where(philox_uniform(seed, position, 2, i - 1) < coin, i, kept)
    tl.store(kept_ptr + request, kept)
    tl.store(weight_ptr + request, tl.load(weights_ptr + request * (K + 1) + kept))


def block_verify(
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
    """As reference.block_verify, with target_probs in float32."""
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
    kept, num_valid, weight = _last_yes(inputs)
    return recover(inputs, kept=kept, num_valid=num_valid, weight=weight)


def _last_yes(inputs: ChainInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(kept [R] int32, tested [R] int32, w at the kept draft [R] f32)."""
    num_requests, num_drafts, device = inputs.num_requests, inputs.num_drafts, inputs.seed.device
    kept = torch.zeros(num_requests, dtype=torch.int32, device=device)
    num_valid = torch.zeros_like(kept)
    weight = torch.ones(num_requests, dtype=torch.float32, device=device)
    if not num_requests or not num_drafts:
        return kept, num_valid, weight
    weights = torch.zeros((num_requests, num_drafts + 1), dtype=torch.float32, device=device)
    mass = torch.zeros((num_requests, num_drafts), dtype=torch.float32, device=device)
    _block_weight_kernel[(num_requests,)](
        inputs.target_probs, inputs.draft_token_ids, inputs.q, inputs.cu_num_logits, weights, num_valid, inputs.vocab, num_drafts,
        num_warps=1,
    )  # fmt: skip
    if num_drafts > 1:
        _block_mass_kernel[(num_requests, num_drafts - 1)](
            inputs.target_probs, inputs.draft_token_ids, inputs.logits, inputs.ids, inputs.one_hot, inputs.lse, inputs.cu_num_logits,
            num_valid, weights, mass, inputs.vocab, num_drafts, inputs.support, HAS_LAW=inputs.has_law, IDS=inputs.layout, BLOCK=BLOCK,
            num_warps=8,
        )  # fmt: skip
    _block_accept_kernel[(num_requests,)](
        weights, mass, inputs.seed, inputs.position, num_valid, kept, weight, num_drafts, num_warps=1
    )  # fmt: skip
    return kept, num_valid, weight
