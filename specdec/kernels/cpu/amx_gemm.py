"""Products with a bf16 weight on AMX tiles: y = x W^T, streaming each weight once.

Owns: the packed layout and the tile loops. oneDNN's packed product reaches 21 GB/s of weights on two Sapphire Rapids
cores; these loops are bound by memory. Must not know: layers. Oracle: torch.matmul in float32 (tests/kernels).

Layout of a packed weight [N, K]: blocks of 16 outputs, in each K/32 tiles of 1 KiB: 16 pairs of inputs x 16 outputs x 2.
A thread walks its blocks front to back, so the hardware prefetcher sees one forward stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import carray, cfunc, njit, types

from specdec.kernels.cpu import team
from specdec.kernels.cpu.llvm import pointer, team_size, thread_num, tile_config, tile_dot, tile_load, tile_store, tile_zero

if TYPE_CHECKING:
    from collections.abc import Sequence

TILE_BYTES = 1024
ROWS = 16  # rows of one tile; row buffers are padded to a multiple of it

_zero0, _zero1, _zero2, _zero3 = (tile_zero(i) for i in range(4))
_load0, _load1, _load2, _load3, _load4, _load5, _load6, _load7 = (tile_load(i) for i in range(8))
_store0, _store1, _store2, _store3 = (tile_store(i) for i in range(4))
_dot045, _dot146, _dot247, _dot345 = tile_dot(0, 4, 5), tile_dot(1, 4, 6), tile_dot(2, 4, 7), tile_dot(3, 4, 5)
_dot046, _dot147, _dot256, _dot357 = tile_dot(0, 4, 6), tile_dot(1, 4, 7), tile_dot(2, 5, 6), tile_dot(3, 5, 7)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Pack [N, K] bf16 (N a multiple of 16, K of 32) into [N/16, K/32, 16, 16, 2]."""
    n, k = weight.shape
    return weight.view(n // 16, 16, k // 32, 16, 2).permute(0, 2, 3, 1, 4).contiguous()


def can_pack(weight: torch.Tensor) -> bool:
    """True when the shape fits whole tiles."""
    return weight.dtype is torch.bfloat16 and weight.shape[0] % 16 == 0 and weight.shape[1] % 32 == 0


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Merge two [I, K] weights so that gate and up of the same 16 outputs are neighbouring blocks."""
    blocks = gate.shape[0] // 16
    pair = torch.stack((gate.view(blocks, 16, -1), up.view(blocks, 16, -1)), dim=1)
    return pair.reshape(2 * gate.shape[0], -1).contiguous()


def tile_config_bytes() -> np.ndarray:
    """The 64-byte configuration of eight 16 x 64-byte tiles."""
    config = np.zeros(64, dtype=np.uint8)
    config[0] = 1
    config[16:32].view(np.uint16)[:] = 64
    config[48:56] = ROWS
    return config


@njit(inline="always")
def _init_row(out: int, is_sum: bool, stride: int) -> None:
    if is_sum:
        _load0(out, stride)
        _load1(out + 64, stride)
        _load2(out + 128, stride)
        _load3(out + 192, stride)
    else:
        _zero0()
        _zero1()
        _zero2()
        _zero3()


@njit(inline="always")
def _row_by_four(x: int, x_stride: int, w: int, num_k: int, out: int, out_stride: int, is_sum: bool) -> None:
    """16 rows by 4 blocks: four weight streams, one tile of x shared by them."""
    block = num_k * TILE_BYTES
    _init_row(out, is_sum, out_stride)
    for k in range(num_k):
        at = w + k * TILE_BYTES
        _load4(x + k * 64, x_stride)
        _load5(at, 64)
        _dot045()
        _load6(at + block, 64)
        _dot146()
        _load7(at + 2 * block, 64)
        _dot247()
        _load5(at + 3 * block, 64)
        _dot345()
    _store0(out, out_stride)
    _store1(out + 64, out_stride)
    _store2(out + 128, out_stride)
    _store3(out + 192, out_stride)


@njit(inline="always")
def _row_by_one(x: int, x_stride: int, w: int, num_k: int, out: int, out_stride: int, is_sum: bool) -> None:
    if is_sum:
        _load0(out, out_stride)
    else:
        _zero0()
    for k in range(num_k):
        _load4(x + k * 64, x_stride)
        _load5(w + k * TILE_BYTES, 64)
        _dot045()
    _store0(out, out_stride)


@njit(inline="always")
def _two_by_two(x: int, x_stride: int, w: int, num_k: int, out: int, out_stride: int, is_sum: bool) -> None:
    """32 rows by 2 blocks: every tile that is loaded is used twice."""
    below, block = ROWS * out_stride, num_k * TILE_BYTES
    if is_sum:
        _load0(out, out_stride)
        _load1(out + 64, out_stride)
        _load2(out + below, out_stride)
        _load3(out + below + 64, out_stride)
    else:
        _zero0()
        _zero1()
        _zero2()
        _zero3()
    for k in range(num_k):
        _load4(x + k * 64, x_stride)
        _load5(x + ROWS * x_stride + k * 64, x_stride)
        _load6(w + k * TILE_BYTES, 64)
        _load7(w + block + k * TILE_BYTES, 64)
        _dot046()
        _dot147()
        _dot256()
        _dot357()
    _store0(out, out_stride)
    _store1(out + 64, out_stride)
    _store2(out + below, out_stride)
    _store3(out + below + 64, out_stride)


@njit(nogil=True, cache=True)
def gemm_blocks(
    x: int, x_stride: int, w: int, num_k: int, first: int, last: int, out: int, out_stride: int, num_row_tiles: int, is_sum: bool
) -> None:
    """Compute blocks [first, last) of out (+)= x W^T. Addresses and strides in bytes; out is float32.

    is_sum starts from what out holds, which is how a residual is added for free. Tiles must be configured.
    """
    block = num_k * TILE_BYTES
    n = first
    if num_row_tiles == 1:
        while n + 4 <= last:
            _row_by_four(x, x_stride, w + n * block, num_k, out + n * 64, out_stride, is_sum)
            n += 4
    else:
        while n + 2 <= last:
            for m in range(0, num_row_tiles - 1, 2):
                _two_by_two(
                    x + m * ROWS * x_stride, x_stride, w + n * block, num_k, out + m * ROWS * out_stride + n * 64, out_stride, is_sum
                )
            if num_row_tiles % 2:
                m = num_row_tiles - 1
                for j in range(n, n + 2):
                    _row_by_one(
                        x + m * ROWS * x_stride, x_stride, w + j * block, num_k, out + m * ROWS * out_stride + j * 64, out_stride, is_sum
                    )
            n += 2
    while n < last:
        for m in range(num_row_tiles):
            _row_by_one(x + m * ROWS * x_stride, x_stride, w + n * block, num_k, out + m * ROWS * out_stride + n * 64, out_stride, is_sum)
        n += 1


@njit(inline="always")
def share(total: int, thread: int, num_threads: int, unit: int) -> tuple[int, int]:
    """The [first, last) part of `total` for a thread, cut at multiples of `unit`."""
    units = (total + unit - 1) // unit
    first = units * thread // num_threads * unit
    last = units * (thread + 1) // num_threads * unit
    return first, min(last, total)


@cfunc(types.void(types.voidptr), nopython=True, cache=True)
def _gemm_entry(arguments: int) -> None:
    a = carray(arguments, (10,), np.int64)
    tile_config(a[9])
    first, last = share(a[4], np.int64(thread_num()), np.int64(team_size()), 4)
    gemm_blocks(a[1], a[2], a[3], a[5], first, last, a[6], a[7], a[8], False)


class AmxWeight:
    """A packed weight and the product with it."""

    __slots__ = ("_arguments", "_config", "_input", "_output", "in_features", "out_features", "packed")

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.packed = pack_weight(weight)
        self._config = tile_config_bytes()
        self._arguments = np.zeros(10, dtype=np.int64)
        self._input = torch.zeros(0, self.in_features, dtype=torch.bfloat16)
        self._output = torch.zeros(0, self.out_features)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] bf16 -> [M, N] float32, a view of a buffer that the next call overwrites."""
        rows = x.shape[0]
        tiles = -(-rows // ROWS)
        if self._input.shape[0] < tiles * ROWS:
            self._input = torch.zeros(tiles * ROWS, self.in_features, dtype=torch.bfloat16)
            self._output = torch.empty(tiles * ROWS, self.out_features)
        self._input[:rows] = x
        a = self._arguments
        a[:] = self._call_arguments(tiles)
        team.run(_gemm_entry.address, a.ctypes.data, int(a[0]))
        return self._output[:rows]

    def _call_arguments(self, tiles: int) -> Sequence[int]:
        return (
            torch.get_num_threads(),
            self._input.data_ptr(),
            self.in_features * 2,
            self.packed.data_ptr(),
            self.out_features // 16,
            self.in_features // 32,
            self._output.data_ptr(),
            self.out_features * 4,
            tiles,
            self._config.ctypes.data,
        )


__all__ = [
    "ROWS",
    "TILE_BYTES",
    "AmxWeight",
    "can_pack",
    "gemm_blocks",
    "interleave",
    "pack_weight",
    "pointer",
    "share",
    "tile_config_bytes",
]
