"""Linear: one weight matrix in the layout its device multiplies fastest.

Owns: packing. On CPUs oneDNN repacks a bf16 weight on every call of torch's linear; packing once makes the same
product 1.4 to 2 times faster. Must not know: what the product means.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812 (the name everybody reads)


def packs_bf16() -> bool:
    """True when this CPU multiplies oneDNN-packed bf16 weights natively."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Linear:
    """y = x W^T + b for x [..., in]; weight [out, in]."""

    __slots__ = ("_packed", "bias", "in_features", "out_features", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias
        self._packed: torch.Tensor | None = None
        if weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and packs_bf16():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out] in x's dtype."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight, packed copies not counted twice."""
        return self.weight.numel() * self.weight.element_size()
