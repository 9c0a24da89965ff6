"""Arithmetic of a Llama layer with autograd, as the heads are trained with it: the same formulas as models/llama.py, without a cache.

Letters: B sequences, T tokens, H hidden, Dh head size.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., H]; computed in float32, returned in x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on halves: x [B, T, heads, Dh]; cos and sin [T, Dh/2] or [B, T, Dh/2] f32."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def silu_mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """down(silu(gate x) * up x); weights as in the checkpoint, [out, in]."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def rope_table(theta: float, head_dim: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [length, Dh/2] f32."""
    angles = torch.arange(length)[:, None] * theta ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    return angles.cos().float(), angles.sin().float()


def matrix(out_size: int, in_size: int) -> nn.Parameter:
    """A random weight [out, in] that keeps the size of what it reads."""
    return nn.Parameter(torch.randn(out_size, in_size) * in_size**-0.5)
