"""int8 products on AMX tiles: the integers of the rounded operands, multiplied by torch, times their scales."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.kernels.cpu.team import has_amx_int8

pytestmark = pytest.mark.skipif(not has_amx_int8(), reason="no AMX int8 tiles: these products are NOT tested here")


@pytest.fixture(scope="module")
def entry() -> object:
    from numba import carray, cfunc, types

    from specdec.kernels.cpu.amx_int8 import gemm_blocks_int8
    from specdec.kernels.cpu.llvm import tile_config

    @cfunc(types.void(types.voidptr), nopython=True)
    def run(arguments: int) -> None:
        a = carray(arguments, (12,), np.int64)
        tile_config(a[11])
        gemm_blocks_int8(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9] != 0, a[10])

    return run


@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 64), (5, 80, 192), (16, 144, 576), (35, 16, 128)])
def test_a_product_is_that_of_the_rounded_operands(entry: object, rows: int, outputs: int, inputs: int, is_sum: bool) -> None:
    from specdec.kernels.cpu import team
    from specdec.kernels.cpu.amx_gemm import tile_config_bytes
    from specdec.kernels.cpu.amx_int8 import can_quantize, quantize_weight, workspace_bytes

    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    x[1:2] = 0  # a row without a scale
    assert can_quantize(weight)
    packed, scales = quantize_weight(weight)
    out = torch.full((rows, outputs), 2.0)
    workspace, config = torch.zeros(workspace_bytes(inputs), dtype=torch.uint8), tile_config_bytes()
    arguments = np.array(
        [x.data_ptr(), inputs, packed.data_ptr(), scales.data_ptr(), 0, outputs // 16, out.data_ptr(), outputs * 4, rows, is_sum,
         workspace.data_ptr(), config.ctypes.data], dtype=np.int64,
    )  # fmt: skip
    team.run(entry.address, arguments.ctypes.data, 1)  # type: ignore[attr-defined]
    row_scales = x.float().abs().amax(dim=1) / 127
    rounded = (x.float() / row_scales.clamp(min=1e-30)[:, None]).round()
    integers = (weight.float() / scales[:, None]).round()
    want = (rounded.double() @ integers.double().T) * scales * row_scales[:, None] + (2.0 if is_sum else 0.0)
    assert float((out.double() - want).norm() / want.norm()) < 1e-3  # x / scale and x * (1 / scale) round a tie either way
    exact = x.double() @ weight.double().T + (2.0 if is_sum else 0.0)
    assert float((out.double() - exact).norm() / exact.norm()) < 0.02
