"""Int8Linear: a weight rounded to int8 with one scale for each output, for draft heads: half the bytes, and a draft need not be exact.

Owns: the rounding and the product. Must not know: which head it serves.
The target judges every draft with its own weights, so rounding can change how many drafts are kept, never what is emitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from specdec.models.linear import Linear

if TYPE_CHECKING:
    from specdec.models.draft_head import FirstLayer
    from specdec.models.llama import DecoderLayer

_INPUTS, _OUTPUTS = 32, 16  # torch's product reads whole groups of these, without looking


class Int8Linear(Linear):
    """y = (x W8^T) scale + b for x [..., in]; weight [out, in] int8, scale [out] bf16 beside rows of bf16, else f32."""

    __slots__ = ("scale",)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        wide = weight.float()
        scale = (wide.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.bfloat16).tiny)
        self.scale = scale.bfloat16() if weight.dtype is torch.bfloat16 else scale
        rounded = (wide / self.scale.float()[:, None]).round_().clamp_(-127, 127)
        super().__init__(rounded.to(torch.int8), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out] in x's dtype."""
        if x.dtype is torch.bfloat16 and self._has_product(x.device.type):
            flat: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x.reshape(-1, self.in_features), self.weight, self.scale)
            product = flat.view(*x.shape[:-1], self.out_features)
        else:
            product = (F.linear(x, self.weight.to(x.dtype)) * self.scale).to(x.dtype)
        return product if self.bias is None else product + self.bias

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, in] -> [M, out] float32, the rounded product widened."""
        return self(x).float()

    def rows(self, index: torch.Tensor | slice) -> Int8Linear:
        """The same for some of the outputs: [n, in], with their scales."""
        part = Int8Linear.__new__(Int8Linear)
        Linear.__init__(part, self.weight[index].contiguous(), None if self.bias is None else self.bias[index].contiguous())
        part.scale = self.scale[index].contiguous()
        return part

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and scales."""
        return self.weight.numel() + self.scale.numel() * self.scale.element_size()

    def _has_product(self, device: str) -> bool:
        return self.in_features % _INPUTS == 0 and self.out_features % _OUTPUTS == 0 and _device_has_product(device)


def rounded(linear: Linear) -> Int8Linear:
    """Round a product."""
    return Int8Linear(linear.weight, linear.bias)


def round_layers(layers: Iterable[DecoderLayer | FirstLayer]) -> None:
    """Round all products of decoder layers in place."""
    for layer in layers:
        attention = layer.attention
        attention.qkv, attention.out = rounded(attention.qkv), rounded(attention.out)
        layer.gate_up, layer.down = rounded(layer.gate_up), rounded(layer.down)


@cache
def _device_has_product(device: str) -> bool:
    """Whether this torch multiplies bf16 rows with int8 weights there, without making a bf16 copy first."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::_weight_int8pack_mm", device.upper()))
