"""Products with an int8 weight on AMX tiles, for drafters: half the bytes of bf16, and a draft need not be exact.

Owns: the packed layout, the rounding of weights (one scale an output) and of rows (one scale a row), and the tile loops.
Must not know: layers. Oracle: the same integers multiplied by torch (tests/kernels/test_amx_int8.py).

Layout of a packed weight [N, K]: blocks of 16 outputs, in each K/64 tiles of 1 KiB: 16 quads of inputs x 16 outputs x 4.
A thread's workspace: 16 row scales, 16 x 64 sums, then 16 rounded rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from specdec.kernels.cpu.amx_gemm import ROWS, TILE_BYTES
from specdec.kernels.cpu.llvm import (
    f32_at,
    largest_half,
    round_half,
    scale_sums,
    tile_dot_int8,
    tile_load,
    tile_store,
    tile_zero,
)

SUMS, ROUNDED = 64, 64 + 4096  # offsets in the workspace

_zero0, _zero1, _zero2, _zero3 = (tile_zero(i) for i in range(4))
_load4, _load5, _load6, _load7 = (tile_load(i) for i in range(4, 8))
_store0, _store1, _store2, _store3 = (tile_store(i) for i in range(4))
_dot045, _dot146, _dot247, _dot345 = tile_dot_int8(0, 4, 5), tile_dot_int8(1, 4, 6), tile_dot_int8(2, 4, 7), tile_dot_int8(3, 4, 5)


def workspace_bytes(widest: int) -> int:
    """Bytes that a thread needs for rows of up to `widest` inputs."""
    return ROUNDED + ROWS * widest


def can_quantize(weight: torch.Tensor) -> bool:
    """True when the shape fits whole tiles of int8."""
    return weight.shape[0] % 16 == 0 and weight.shape[1] % 64 == 0


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight [N, K] to int8 with one scale an output: (packed [N/16, K/64, 16, 16, 4] int8, scales [N] f32)."""
    n, k = weight.shape
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / 127).clamp(min=1e-12)
    rounded = (wide / scales[:, None]).round().to(torch.int8)
    return rounded.view(n // 16, 16, k // 64, 16, 4).permute(0, 2, 3, 1, 4).contiguous(), scales.contiguous()


@njit(error_model="numpy")
def round_rows(x: int, width: int, num_rows: int, workspace: int) -> None:
    """Round up to 16 rows of bf16 inputs to int8, each with its own scale."""
    for row in range(num_rows):
        source = x + row * width * 2
        scale = largest_half(source, width) / np.float32(127.0)
        f32_at(workspace + row * 4, scale)
        inverse = np.float32(1.0) / scale if scale > np.float32(0.0) else np.float32(0.0)
        round_half(source, width, inverse, workspace + ROUNDED + row * width)


@njit
def dot_rows(
    width: int, w: int, scales: int, first: int, last: int, out: int, out_stride: int, num_rows: int, is_sum: bool, workspace: int
) -> None:
    """Blocks [first, last) of out (+)= x W^T (f32) for the rows that round_rows left in the workspace. Tiles must be configured."""
    num_k, block, rounded, sums = width // 64, width // 64 * TILE_BYTES, workspace + ROUNDED, workspace + SUMS
    n = first
    while n < last:
        count = min(4, last - n)
        at = w + n * block
        _zero0()
        _zero1()
        _zero2()
        _zero3()
        for k in range(num_k):
            _load4(rounded + k * 64, width)
            _load5(at + k * TILE_BYTES, 64)
            _dot045()
            if count == 4:
                _load6(at + block + k * TILE_BYTES, 64)
                _dot146()
                _load7(at + 2 * block + k * TILE_BYTES, 64)
                _dot247()
                _load5(at + 3 * block + k * TILE_BYTES, 64)
                _dot345()
        _store0(sums, 256)
        if count == 4:
            _store1(sums + 64, 256)
            _store2(sums + 128, 256)
            _store3(sums + 192, 256)
        else:
            count = 1
        for row in range(num_rows):
            for j in range(count):
                scale_sums(
                    sums + row * 256 + j * 64, scales + (n + j) * 64, workspace + row * 4, out + row * out_stride + (n + j) * 64, is_sum
                )
        n += count


@njit
def gemm_blocks_int8(
    x: int, width: int, w: int, scales: int, first: int, last: int, out: int, out_stride: int, num_rows: int, is_sum: bool, workspace: int
) -> None:
    """The same for any number of rows of bf16 inputs [num_rows, width]."""
    for m in range(0, num_rows, ROWS):
        rows = min(ROWS, num_rows - m)
        round_rows(x + m * width * 2, width, rows, workspace)
        dot_rows(width, w, scales, first, last, out + m * out_stride, out_stride, rows, is_sum, workspace)
