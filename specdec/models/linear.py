"""Linear: one weight matrix in the layout its device multiplies fastest.

Owns: packing. On CPUs oneDNN repacks a bf16 weight on every call of torch's linear; packing once makes the same
product 1.4 to 2 times faster. Must not know: what the product means.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from specdec.kernels.cpu.amx_gemm import AmxWeight


@cache
def packs_bf16() -> bool:
    """True when this CPU multiplies oneDNN-packed bf16 weights natively."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Linear:
    """y = x W^T + b for x [..., in]; weight [out, in]."""

    __slots__ = ("_amx", "_packed", "bias", "in_features", "out_features", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias
        self._packed: torch.Tensor | None = None  # made on first use: a fused stack has its own copy
        self._amx: AmxWeight | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out] in x's dtype."""
        if self._packs():
            if self._packed is None:
                self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), 1)
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, in] -> [M, out] float32: the accumulator itself where the device keeps it, else the rounded product widened.

        The result may be a buffer that the next call of this linear overwrites.
        """
        if self._amx is None and self._has_tiles():
            from specdec.kernels.cpu.amx_gemm import AmxWeight

            self._amx = AmxWeight(self.weight)
        return self._amx(x) if self._amx is not None else self(x).float()

    def rows(self, index: torch.Tensor | slice) -> Linear:
        """The same for some of the outputs: [n, in]."""
        return Linear(self.weight[index].contiguous(), None if self.bias is None else self.bias[index].contiguous())

    def _packs(self) -> bool:
        return self.weight.device.type == "cpu" and self.weight.dtype is torch.bfloat16 and packs_bf16()

    def _has_tiles(self) -> bool:
        from specdec.kernels.cpu.team import has_amx

        return self._packs() and self.bias is None and self.out_features % 16 == 0 and self.in_features % 32 == 0 and has_amx()

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight, packed copies not counted twice."""
        return self.weight.numel() * self.weight.element_size()
