"""Triton: the target's law of a logits row, and draws from it, without sorting. Semantics: reference.py.

Owns: four kernels, each one program per row. Must not know: requests. Read next: device.py for the cuts, verify_coupled.py.

Policies: NaN and +inf count as -inf; a row without a finite logit has law zero and sample -1; ties at a border are all kept, ties
at temperature 0 go to the lowest id; L may be 0; V need not be a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec.kernels.checks import FLOATING, check
from specdec.kernels.device import locate_mass, locate_weight, philox_uniform, row_cut, row_mass, weight

BLOCK = 4096  # entries of a row read at once
_INT = (torch.int64,)
_FLOAT = (torch.float32,)


@triton.jit
def _uniform_kernel(seed_ptr, position_ptr, index_ptr, out_ptr, count, purpose, BLOCK: tl.constexpr):
    """One program per BLOCK named draws."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    seed = tl.load(seed_ptr + offsets, mask=inside, other=0)
    position = tl.load(position_ptr + offsets, mask=inside, other=0)
    index = tl.load(index_ptr + offsets, mask=inside, other=0)
    tl.store(out_ptr + offsets, philox_uniform(seed, position, purpose, index), mask=inside)


@triton.jit
def _target_law_kernel(logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, law_ptr, V, BLOCK: tl.constexpr):
    """One program per row: find the cuts, add up the survivors, write the law."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * V
    temperature = tl.load(temperature_ptr + row)
    maximum, inv_temperature, floor = row_cut(
        row_ptr, V, temperature, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row), BLOCK
    )
    total = row_mass(row_ptr, V, maximum, inv_temperature, floor, BLOCK)
    inv_total = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0).to(tl.float32)
    chosen = locate_weight(row_ptr, V, tl.full([], 0.0, tl.float32), maximum, inv_temperature, floor, BLOCK)  # lowest survivor
    is_greedy = temperature < 1e-5
    for start in range(0, V, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        law = weight(row_ptr, offsets, V, maximum, inv_temperature, floor) * inv_total
        law = tl.where(is_greedy, (offsets == chosen).to(tl.float32), law)
        tl.store(law_ptr + row.to(tl.int64) * V + offsets, law, mask=offsets < V)


@triton.jit
def _sample_kernel(mass_ptr, u_ptr, ids_ptr, V, BLOCK: tl.constexpr):
    """One program per row of masses."""
    row = tl.program_id(0)
    found = locate_mass(mass_ptr + row.to(tl.int64) * V, V, tl.load(u_ptr + row), BLOCK)
    tl.store(ids_ptr + row, found.to(tl.int64))


@triton.jit
def _sample_logits_kernel(logits_ptr, u_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, ids_ptr, V, BLOCK: tl.constexpr):
    """One program per row: find the cuts, then walk the survivors' CDF; the law is never written."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * V
    temperature = tl.load(temperature_ptr + row)
    maximum, inv_temperature, floor = row_cut(
        row_ptr, V, temperature, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row), BLOCK
    )
    u = tl.where(temperature < 1e-5, 0.0, tl.load(u_ptr + row))  # 0 picks the lowest of tied argmaxes
    found = locate_weight(row_ptr, V, u, maximum, inv_temperature, floor, BLOCK)
    tl.store(ids_ptr + row, found.to(tl.int64))


def uniform(seed: torch.Tensor, position: torch.Tensor, *, purpose: int, index: torch.Tensor | int = 0) -> torch.Tensor:
    """As philox.uniform, bit for bit."""
    indices = index if isinstance(index, torch.Tensor) else torch.full_like(seed, index)
    shape = tuple(seed.shape)
    check({"seed": (seed, shape, _INT), "position": (position, shape, _INT), "index": (indices, shape, _INT)})
    out = torch.empty(shape, dtype=torch.float32, device=seed.device)
    if out.numel():
        _uniform_kernel[(triton.cdiv(out.numel(), 256),)](seed, position, indices, out, out.numel(), purpose, BLOCK=256)
    return out


def target_law(
    logits: torch.Tensor, *, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """As reference.target_law, in float32."""
    _check_rows(logits, temperature, top_k, top_p, min_p)
    law = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if law.numel():
        _target_law_kernel[(logits.shape[0],)](logits, temperature, top_k, top_p, min_p, law, logits.shape[1], BLOCK=BLOCK, num_warps=8)
    return law


def sample(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """As reference.sample; probs in float32, float16 or bfloat16."""
    num_rows, vocab = probs.shape
    check({"probs": (probs, (num_rows, vocab), FLOATING), "u": (u, (num_rows,), _FLOAT)})
    ids = torch.empty(num_rows, dtype=torch.int64, device=probs.device)
    if num_rows:
        _sample_kernel[(num_rows,)](probs, u, ids, vocab, BLOCK=BLOCK, num_warps=8)
    return ids


def sample_logits(
    logits: torch.Tensor,
    u: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """As reference.sample_logits."""
    _check_rows(logits, temperature, top_k, top_p, min_p)
    num_rows, vocab = logits.shape
    check({"logits": (logits, (num_rows, vocab), FLOATING), "u": (u, (num_rows,), _FLOAT)})
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _sample_logits_kernel[(num_rows,)](logits, u, temperature, top_k, top_p, min_p, ids, vocab, BLOCK=BLOCK, num_warps=8)
    return ids


def _check_rows(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> None:
    rows = (logits.shape[0],)
    check(
        {
            "logits": (logits, tuple(logits.shape), FLOATING),
            "temperature": (temperature, rows, _FLOAT),
            "top_k": (top_k, rows, _INT),
            "top_p": (top_p, rows, _FLOAT),
            "min_p": (min_p, rows, _FLOAT),
        }
    )
