"""Triton: the token after the kept drafts, from (weight * p - q)+ or the bonus row. Semantics: rules.py and reference.py.

Owns: three small kernels and the packing of a chain's result. Must not know: how many drafts were kept, or why.
Read next: rejection_sample.py.

The residual is written once per request, [R, V] float32: the draft law may live on a reduced vocabulary, and scattering its
few entries over a copy of the target row is simpler than merging two id orders on the fly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec.kernels.device import locate_mass, philox_uniform
from specdec.kernels.draft_law import ChainInputs, load_draft_logits
from specdec.kernels.result_row import empty_result, write_row
from specdec.kernels.verified import Verified

BLOCK = 4096


@triton.jit
def num_tested(draft_ptr, cu_num_logits_ptr, request, K):
    """(first logits row, drafts sent, drafts before the first refused one) of a request; sent is -1 without rows."""
    start = tl.load(cu_num_logits_ptr + request)
    num_drafts = tl.load(cu_num_logits_ptr + request + 1) - start - 1
    num_valid = tl.full([], 0, tl.int32)
    is_chain = num_drafts > 0
    for i in range(num_drafts):
        is_chain = is_chain & (tl.load(draft_ptr + request * K + i) >= 0)
        num_valid += is_chain.to(tl.int32)
    return start, num_drafts, num_valid


@triton.jit
def _weigh_target_kernel(
    probs_ptr, draft_ptr, one_hot_ptr, cu_num_logits_ptr, kept_ptr, valid_ptr, weight_ptr, residual_ptr, V, K,
    HAS_LAW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per (request, block of V): weight * p of the row after the kept drafts, without a certain draft's id."""
    request = tl.program_id(0).to(tl.int64)
    kept = tl.load(kept_ptr + request)
    start = tl.load(cu_num_logits_ptr + request)
    if tl.load(cu_num_logits_ptr + request + 1) > start:
        offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        p = tl.load(probs_ptr + (start + kept).to(tl.int64) * V + offsets, mask=offsets < V, other=0.0) * tl.load(weight_ptr + request)
        if kept < tl.load(valid_ptr + request):
            is_certain = True
            if HAS_LAW:
                is_certain = tl.load(one_hot_ptr + request) != 0
            if is_certain:
                p = tl.where(offsets == tl.load(draft_ptr + request * K + kept), 0.0, p)
        tl.store(residual_ptr + request * V + offsets, p, mask=offsets < V)


@triton.jit
def _subtract_draft_kernel(
    logits_ptr, ids_ptr, one_hot_ptr, lse_ptr, kept_ptr, valid_ptr, residual_ptr, V, K, S, IDS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per (request, block of S): take q off the residual at the draft law's ids, which are distinct."""
    request = tl.program_id(0).to(tl.int64)
    kept = tl.load(kept_ptr + request)
    if (kept < tl.load(valid_ptr + request)) & (tl.load(one_hot_ptr + request) == 0):
        row = request * K + kept
        offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        logits, ids = load_draft_logits(logits_ptr, ids_ptr, row, offsets, S, IDS)
        q = tl.exp(logits - tl.load(lse_ptr + row))
        at = residual_ptr + request * V + ids
        tl.store(at, tl.load(at, mask=ids >= 0, other=0.0) - q, mask=ids >= 0)


@triton.jit
def _recover_kernel(
    probs_ptr, residual_ptr, draft_ptr, cu_num_logits_ptr, kept_ptr, seed_ptr, position_ptr, tokens_ptr, path_ptr, counts_ptr,
    R, V, K, WIDTH_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request: draw from the residual, or from p where nothing is left of it, and write the result row."""
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + request)
    num_drafts = tl.load(cu_num_logits_ptr + request + 1) - start - 1
    kept = tl.load(kept_ptr + request)
    token = tl.full([], -1, tl.int32)
    if num_drafts >= 0:
        u = philox_uniform(tl.load(seed_ptr + request), tl.load(position_ptr + request), 3, kept)
        token = locate_mass(residual_ptr + request * V, V, u, BLOCK)
        if token < 0:
            token = locate_mass(probs_ptr + (start + kept).to(tl.int64) * V, V, u, BLOCK)
    write_row(draft_ptr, tokens_ptr, path_ptr, counts_ptr, request, kept, token.to(tl.int64), num_drafts, R, K, WIDTH_BLOCK)


def recover(inputs: ChainInputs, *, kept: torch.Tensor, num_valid: torch.Tensor, weight: torch.Tensor) -> Verified:
    """Draw the token after `kept` [R] int32 drafts of num_valid [R] int32 tested ones; weight [R] f32 multiplies p."""
    device, num_requests = inputs.seed.device, inputs.num_requests
    tokens, path, counts = empty_result(num_requests, inputs.num_drafts, device)
    if not num_requests:
        return Verified(tokens, path, *counts)
    residual = torch.zeros((num_requests, inputs.vocab), dtype=torch.float32, device=device)
    blocks = triton.cdiv(inputs.vocab, BLOCK)
    _weigh_target_kernel[(num_requests, blocks)](
        inputs.target_probs, inputs.draft_token_ids, inputs.one_hot, inputs.cu_num_logits, kept, num_valid, weight, residual,
        inputs.vocab, inputs.num_drafts, HAS_LAW=inputs.has_law, BLOCK=BLOCK,
    )  # fmt: skip
    if inputs.has_law:
        _subtract_draft_kernel[(num_requests, triton.cdiv(inputs.support, BLOCK))](
            inputs.logits, inputs.ids, inputs.one_hot, inputs.lse, kept, num_valid, residual,
            inputs.vocab, inputs.num_drafts, inputs.support, IDS=inputs.layout, BLOCK=BLOCK,
        )  # fmt: skip
    _recover_kernel[(num_requests,)](
        inputs.target_probs, residual, inputs.draft_token_ids, inputs.cu_num_logits, kept, inputs.seed, inputs.position,
        tokens, path, counts, num_requests, inputs.vocab, inputs.num_drafts,
        WIDTH_BLOCK=triton.next_power_of_2(inputs.num_drafts + 1), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return Verified(tokens, path, *counts)
