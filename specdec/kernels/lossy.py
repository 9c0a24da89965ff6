"""Triton: the three rules that do not keep the target's law: fly, typical, synthetic. Semantics: reference.py and rules.py.

Owns: their accept kernels. Must not know: who allowed them; the server marks their answers as lossy. Read next: input_prep.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec.kernels.checks import check
from specdec.kernels.device import philox_uniform
from specdec.kernels.draft_law import chain_inputs
from specdec.kernels.recover import num_tested, recover
from specdec.kernels.rejection_sample import native_yes
from specdec.kernels.result_row import empty_result, write_row
from specdec.kernels.verified import Verified

BLOCK = 4096
_INT = (torch.int64,)


# ---------------------------------------------------------------- fly


@triton.jit
def _fly_gate_kernel(gate_ptr, draft_ptr, cu_num_logits_ptr, may_hold_ptr, threshold, top_k, V, K, BLOCK: tl.constexpr):
    """One program per (request, draft): whether the target is undecided there and the draft possible.

    The top_k masses are found one pass each, in the order (mass, lowest id), so that ties are all counted.
    """
    request = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1)
    start = tl.load(cu_num_logits_ptr + request)
    draft = tl.load(draft_ptr + request * K + i)
    if (start + i + 1 < tl.load(cu_num_logits_ptr + request + 1)) & (draft >= 0):
        row_ptr = gate_ptr + (start + i).to(tl.int64) * V
        entropy = tl.full([], 0.0, tl.float32)
        last = tl.full([], float("inf"), tl.float32)
        last_id = tl.full([], -1, tl.int32)
        for _ in range(top_k):
            best = tl.full([], -1.0, tl.float32)
            best_id = tl.full([], 0x7FFFFFFF, tl.int32)
            for block in range(0, V, BLOCK):
                offsets = block + tl.arange(0, BLOCK)
                p = tl.load(row_ptr + offsets, mask=offsets < V, other=-1.0)
                p = tl.where((p < last) | ((p == last) & (offsets > last_id)), p, -1.0)
                peak = tl.max(p, axis=0)
                peak_id = tl.min(tl.where(p == peak, offsets, 0x7FFFFFFF), axis=0)
                best_id = tl.where(peak > best, peak_id, best_id)
                best = tl.maximum(best, peak)
            entropy -= tl.where(best > 0.0, best * tl.log(tl.maximum(best, 1e-38)), 0.0)
            last = best
            last_id = best_id
        may_hold = (tl.load(row_ptr + draft) > 0.0) & (entropy >= threshold)
        tl.store(may_hold_ptr + request * K + i, may_hold.to(tl.int32))


@triton.jit
def _fly_accept_kernel(
    probs_ptr, draft_ptr, q_ptr, may_hold_ptr, cu_num_logits_ptr, seed_ptr, position_ptr, kept_ptr, valid_ptr, V, K, window
):
    """One program per request: the native test in order, holding one refused draft at a time."""
    request = tl.program_id(0).to(tl.int64)
    start, _, num_valid = num_tested(draft_ptr, cu_num_logits_ptr, request, K)
    seed = tl.load(seed_ptr + request)
    position = tl.load(position_ptr + request)
    kept = tl.full([], 0, tl.int32)
    held = tl.full([], -1, tl.int32)
    is_alive = num_valid > 0
    for i in range(num_valid):
        yes = native_yes(probs_ptr, draft_ptr, q_ptr, seed, position, request, start, i, V, K)
        is_held = held >= 0
        can_hold = (i + window < num_valid) & (tl.load(may_hold_ptr + request * K + i) != 0)
        is_confirmed = is_alive & yes & ((held < 0) | (i - held == window))
        starts_holding = is_alive & (yes == 0) & (held < 0) & can_hold
        is_alive = is_alive & (yes | starts_holding)
        kept = tl.where(is_confirmed, i + 1, kept)
        held = tl.where(starts_holding, i, tl.where(is_confirmed & is_held, -1, held))
    tl.store(kept_ptr + request, kept)
    tl.store(valid_ptr + request, num_valid)


def fly(
    target_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    *,
    cu_num_logits: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    gate_probs: torch.Tensor | None = None,
    draft_logits: torch.Tensor | None = None,
    draft_ids: torch.Tensor | None = None,
    one_hot: torch.Tensor | None = None,
    window: int = 6,
    entropy_threshold: float = 0.3,
    entropy_top_k: int = 3,
) -> Verified:
    """As reference.fly, with target_probs and gate_probs in float32."""
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
    gates = target_probs if gate_probs is None else gate_probs
    check(
        {"target_probs": (target_probs, tuple(gates.shape), (torch.float32,)), "gate_probs": (gates, tuple(gates.shape), (torch.float32,))}
    )
    kept = torch.zeros(inputs.num_requests, dtype=torch.int32, device=seed.device)
    num_valid = torch.zeros_like(kept)
    if inputs.num_requests and inputs.num_drafts:
        may_hold = torch.zeros((inputs.num_requests, inputs.num_drafts), dtype=torch.int32, device=seed.device)
        _fly_gate_kernel[(inputs.num_requests, inputs.num_drafts)](
            gates, draft_token_ids, cu_num_logits, may_hold, entropy_threshold, min(entropy_top_k, inputs.vocab), inputs.vocab,
            inputs.num_drafts, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        _fly_accept_kernel[(inputs.num_requests,)](
            target_probs, draft_token_ids, inputs.q, may_hold, cu_num_logits, seed, position, kept, num_valid, inputs.vocab,
            inputs.num_drafts, window, num_warps=1,
        )  # fmt: skip
    return recover(inputs, kept=kept, num_valid=num_valid, weight=torch.ones_like(kept, dtype=torch.float32))


# ---------------------------------------------------------------- typical


@triton.jit
def _typical_row_kernel(probs_ptr, bar_ptr, best_ptr, epsilon, delta, V, BLOCK: tl.constexpr):
    """One program per logits row: its bar min(epsilon, delta exp(-H)) and its most likely id, -1 for a row without mass."""
    row = tl.program_id(0)
    row_ptr = probs_ptr + row.to(tl.int64) * V
    entropy = tl.full([], 0.0, tl.float64)
    best = tl.full([], 0.0, tl.float32)
    best_id = tl.full([], -1, tl.int32)
    for start in range(0, V, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        p = tl.load(row_ptr + offsets, mask=offsets < V, other=0.0)
        entropy -= tl.sum(tl.where(p > 0.0, p * tl.log(tl.maximum(p, 1e-38)), 0.0), axis=0).to(tl.float64)
        peak = tl.max(p, axis=0)
        peak_id = tl.min(tl.where(p == peak, offsets, 0x7FFFFFFF), axis=0)
        best_id = tl.where(peak > best, peak_id, best_id)
        best = tl.maximum(best, peak)
    tl.store(bar_ptr + row, tl.minimum(epsilon, delta * tl.exp(-entropy.to(tl.float32))))
    tl.store(best_ptr + row, best_id.to(tl.int64))


@triton.jit
def _typical_accept_kernel(
    probs_ptr, bar_ptr, best_ptr, draft_ptr, cu_num_logits_ptr, tokens_ptr, path_ptr, counts_ptr, R, V, K, WIDTH_BLOCK: tl.constexpr
):
    """One program per request: leading drafts at or above their bars, then the most likely token of the next row."""
    request = tl.program_id(0).to(tl.int64)
    start, num_drafts, num_valid = num_tested(draft_ptr, cu_num_logits_ptr, request, K)
    kept = tl.full([], 0, tl.int32)
    is_alive = num_valid > 0
    for i in range(num_valid):
        p = tl.load(probs_ptr + (start + i).to(tl.int64) * V + tl.load(draft_ptr + request * K + i))
        is_alive = is_alive & (p >= tl.load(bar_ptr + start + i))
        kept += is_alive.to(tl.int32)
    token = tl.load(best_ptr + start + kept, mask=num_drafts >= 0, other=-1)
    write_row(draft_ptr, tokens_ptr, path_ptr, counts_ptr, request, kept, token, num_drafts, R, K, WIDTH_BLOCK)


def typical(
    target_probs: torch.Tensor, draft_token_ids: torch.Tensor, *, cu_num_logits: torch.Tensor, epsilon: float = 0.09, delta: float = 0.3
) -> Verified:
    """As reference.typical, with target_probs in float32."""
    num_requests, num_drafts = draft_token_ids.shape
    num_rows, vocab = target_probs.shape
    device = check(
        {
            "target_probs": (target_probs, (num_rows, vocab), (torch.float32,)),
            "draft_token_ids": (draft_token_ids, (num_requests, num_drafts), _INT),
            "cu_num_logits": (cu_num_logits, (num_requests + 1,), (torch.int32,)),
        }
    )
    tokens, path, counts = empty_result(num_requests, num_drafts, device)
    bars = torch.empty(num_rows, dtype=torch.float32, device=device)
    best = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows:
        _typical_row_kernel[(num_rows,)](target_probs, bars, best, epsilon, delta, vocab, BLOCK=BLOCK, num_warps=8)
    if num_requests:
        _typical_accept_kernel[(num_requests,)](
            target_probs, bars, best, draft_token_ids, cu_num_logits, tokens, path, counts, num_requests, vocab, num_drafts,
            WIDTH_BLOCK=triton.next_power_of_2(num_drafts + 1), num_warps=1,
        )  # fmt: skip
    return Verified(tokens, path, *counts)


# ---------------------------------------------------------------- synthetic


@triton.jit
def _synthetic_kernel(
    target_ptr, draft_ptr, rates_ptr, cu_num_logits_ptr, seed_ptr, position_ptr, tokens_ptr, path_ptr, counts_ptr, R, K,
    WIDTH_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request: coins against rates, then the target's sample; a row without a sample fails the request."""
    request = tl.program_id(0).to(tl.int64)
    start, num_drafts, num_valid = num_tested(draft_ptr, cu_num_logits_ptr, request, K)
    seed = tl.load(seed_ptr + request)
    position = tl.load(position_ptr + request)
    kept = tl.full([], 0, tl.int32)
    is_alive = num_valid > 0
    is_sound = num_drafts >= 0
    for i in range(num_valid):
        is_sound = is_sound & ((tl.load(target_ptr + start + i) >= 0) | (is_alive == 0))
        is_alive = is_alive & (philox_uniform(seed, position, 4, i) < tl.load(rates_ptr + i))
        kept += is_alive.to(tl.int32)
    token = tl.load(target_ptr + start + kept, mask=is_sound, other=-1)
    write_row(draft_ptr, tokens_ptr, path_ptr, counts_ptr, request, kept, token, num_drafts, R, K, WIDTH_BLOCK)


def synthetic(
    target_token_ids: torch.Tensor,
    draft_token_ids: torch.Tensor,
    *,
    cu_num_logits: torch.Tensor,
    rates: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> Verified:
    """As reference.synthetic."""
    num_requests, num_drafts = draft_token_ids.shape
    device = check(
        {
            "target_token_ids": (target_token_ids, tuple(target_token_ids.shape), _INT),
            "draft_token_ids": (draft_token_ids, (num_requests, num_drafts), _INT),
            "cu_num_logits": (cu_num_logits, (num_requests + 1,), (torch.int32,)),
            "rates": (rates, (num_drafts,), (torch.float32,)),
            "seed": (seed, (num_requests,), _INT),
            "position": (position, (num_requests,), _INT),
        }
    )
    tokens, path, counts = empty_result(num_requests, num_drafts, device)
    if num_requests:
        _synthetic_kernel[(num_requests,)](
            target_token_ids, draft_token_ids, rates, cu_num_logits, seed, position, tokens, path, counts, num_requests, num_drafts,
            WIDTH_BLOCK=triton.next_power_of_2(num_drafts + 1), num_warps=1,
        )  # fmt: skip
    return Verified(tokens, path, *counts)
