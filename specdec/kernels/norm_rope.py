"""Triton: the small operators between two linears: rms_norm, add_rms_norm, rotate, silu_mul. Semantics: reference_layers.py.

Owns: four kernels, each reading its input once. Must not know: weights or models. Read next: store_kv.py.

Arithmetic is float32 whatever the storage; results are rounded once, to the input's dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, outer_stride, inner_stride, INNER, H, eps, BLOCK: tl.constexpr):
    """One program per normalised row; rows are (outer, inner), so heads of a fused projection need no copy."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    x = tl.load(x_ptr + (row // INNER) * outer_stride + (row % INNER) * inner_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / H + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * H + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, x_stride, residual_stride, H, eps, BLOCK: tl.constexpr):
    """One program per row: the sum is rounded to its dtype first, then normalised, as two separate operators would."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
    rounded = (x + residual).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row * H + columns, rounded, mask=inside)
    total = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(total * total, axis=0) / H + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * H + columns, (total * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_kernel(x_ptr, cos_ptr, sin_ptr, out_ptr, row_stride, head_stride, HEADS, HALF, BLOCK: tl.constexpr):
    """One program per (row, head): both halves of a head meet in registers."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < HALF
    cos = tl.load(cos_ptr + row * HALF + columns, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * HALF + columns, mask=inside, other=0.0).to(tl.float32)
    source = x_ptr + row * row_stride + head * head_stride + columns
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    target = out_ptr + (row * HEADS + head) * 2 * HALF + columns
    tl.store(target, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, row_stride, WIDTH, BLOCK: tl.constexpr):
    """One program per (row, block of I)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * WIDTH + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As reference_layers.rms_norm for x of two or three dimensions; only the last one must be without gaps."""
    _check_last(x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rows = x if x.dim() == 3 else x.unsqueeze(-2)
        hidden = x.shape[-1]
        _rms_norm_kernel[(out.numel() // hidden,)](
            x, weight, out, rows.stride(0), rows.stride(1), rows.shape[1], hidden, eps, BLOCK=triton.next_power_of_2(hidden)
        )  # fmt: skip
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As reference_layers.add_rms_norm."""
    _check_last(x, weight)
    if x.dim() != 2 or x.shape != residual.shape or x.dtype != residual.dtype or residual.stride(-1) != 1:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)} and residual {residual.dtype} {tuple(residual.shape)}, but both must be alike, [N, H]"
        )
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    num_rows, hidden = x.shape
    if num_rows:
        _add_rms_norm_kernel[(num_rows,)](
            x, residual, weight, out, total, x.stride(0), residual.stride(0), hidden, eps, BLOCK=triton.next_power_of_2(hidden)
        )  # fmt: skip
    return out, total


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As reference_layers.rotate; x may be a slice of a fused projection."""
    num_rows, num_heads, head_dim = x.shape
    for name, angles in (("cos", cos), ("sin", sin)):
        if tuple(angles.shape) != (num_rows, head_dim // 2) or not angles.is_contiguous():
            raise ValueError(f"{name} has shape {tuple(angles.shape)}, but it must be contiguous [{num_rows}, {head_dim // 2}]: half of x")
    if head_dim % 2 or x.stride(2) != 1:
        raise ValueError(f"x has shape {tuple(x.shape)} and strides {x.stride()}, but a head must be even and without gaps")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _rotate_kernel[(num_rows, num_heads)](
            x, cos, sin, out, x.stride(0), x.stride(1), num_heads, head_dim // 2, BLOCK=triton.next_power_of_2(head_dim // 2), num_warps=1
        )  # fmt: skip
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As reference_layers.silu_mul."""
    num_rows, both = gate_up.shape
    if both % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up has shape {tuple(gate_up.shape)} and strides {gate_up.stride()}, but it must be [N, 2I] without gaps")
    width = both // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(triton.next_power_of_2(max(width, 1)), 1024)
    if out.numel():
        _silu_mul_kernel[(num_rows, triton.cdiv(width, block))](gate_up, out, gate_up.stride(0), width, BLOCK=block)
    return out


def _check_last(x: torch.Tensor, weight: torch.Tensor) -> None:
    if tuple(weight.shape) != (x.shape[-1],):
        raise ValueError(f"weight has shape {tuple(weight.shape)}, but x has {x.shape[-1]} entries in its last dimension")
    if x.dim() not in (2, 3) or (x.numel() and x.stride(-1) != 1) or not weight.is_contiguous():
        raise ValueError(
            f"x has shape {tuple(x.shape)} and strides {x.stride()}, but it must have 2 or 3 dimensions, the last one without gaps"
        )
