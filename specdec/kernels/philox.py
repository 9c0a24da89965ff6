"""Counter-based random numbers: Philox4x32-10, the same bits on every device and in every column.

Owns: which key and counter a draw uses, and how bits become a uniform. Must not know: what a draw decides.
Read next: reference.py. The Triton form of the same function is `device.philox_uniform`.

A draw is named, not consumed: key = (seed low, seed high), counter = (position low, index, purpose, position high), 32 bits
each. So a row's noise depends on its own name only: not on its neighbours in the batch, nor on how often anyone drew before.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

PURPOSE_TARGET = 0  # the target's own sample at a row; keyed by position alone
PURPOSE_DRAFT = 1  # draws of a drafter
PURPOSE_ACCEPT = 2  # accept coins, one per draft
PURPOSE_RESIDUAL = 3  # the recovered or bonus token
PURPOSE_SYNTHETIC = 4  # coins of synthetic acceptance

ROUNDS = 10
_MULTIPLIER_A = 0xD2511F53
_MULTIPLIER_B = 0xCD9E8D57
_WEYL_A = 0x9E3779B9
_WEYL_B = 0xBB67AE85
_MASK = 0xFFFFFFFF

Words = TypeVar("Words", np.ndarray, torch.Tensor)  # 32-bit words, each held in a signed 64-bit integer


def philox4x32(c0: Words, c1: Words, c2: Words, c3: Words, k0: Words, k1: Words) -> tuple[Words, Words, Words, Words]:
    """Return the four output words of counter (c0, c1, c2, c3) under key (k0, k1), all int64 holding 32-bit values.

    A 32 x 32 bit product wraps in int64 but keeps its 64 bits, so a shift and a mask give the exact upper word.
    """
    for _ in range(ROUNDS):
        product_a = c0 * _MULTIPLIER_A
        product_b = c2 * _MULTIPLIER_B
        c0, c1 = ((product_b >> 32) & _MASK) ^ c1 ^ k0, product_b & _MASK
        c2, c3 = ((product_a >> 32) & _MASK) ^ c3 ^ k1, product_a & _MASK
        k0 = (k0 + _WEYL_A) & _MASK
        k1 = (k1 + _WEYL_B) & _MASK
    return c0, c1, c2, c3


def uniform(seed: torch.Tensor, position: torch.Tensor, *, purpose: int, index: torch.Tensor | int = 0) -> torch.Tensor:
    """Return one float32 uniform per named draw, in [2^-24, 1 - 2^-24].

    The value is an odd multiple of 2^-24: 23 random bits and a half step, exact in float32, so it is never 0 (which would
    accept a token of probability 0) and never rounds to 1 (which would walk past the end of a CDF).

    Args:
        seed, position: [L] int64, any value; both name the stream by all their 64 bits.
        purpose: one of the PURPOSE_ constants, so that draws of different meaning never share bits.
        index: [L] int64 or an int in [0, 2^32): which draw of this position and purpose.

    Raises:
        ValueError: shapes differ or a dtype is not int64.
    """
    word, _ = _two_words(seed, position, purpose, index)
    odd = (word >> 9) * 2 + 1
    return odd.to(torch.float32) * 2.0**-24


def uniform64(seed: torch.Tensor, position: torch.Tensor, *, purpose: int, index: torch.Tensor | int = 0) -> torch.Tensor:
    """Return float64 uniforms in [2^-53, 1 - 2^-53]: 52 random bits and a half step. Arguments as in `uniform`.

    The upper 23 bits are those of `uniform`, so both names mean the same draw at two resolutions.
    """
    high, low = _two_words(seed, position, purpose, index)
    odd = ((high << 20) | (low >> 12)) * 2 + 1
    return odd.to(torch.float64) * 2.0**-53


def _two_words(seed: torch.Tensor, position: torch.Tensor, purpose: int, index: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
    _check(seed, position, index)
    if seed.device.type != "cpu":
        word0, word1, _, _ = _counter_words(seed, position, purpose, index if isinstance(index, torch.Tensor) else seed.new_tensor(index))
        return word0, word1
    # numpy runs these hundred tiny operations several times faster than torch's dispatcher
    index_words = index.numpy() if isinstance(index, torch.Tensor) else np.array([index], dtype=np.int64)
    words = _counter_words(seed.reshape(-1).numpy(), position.reshape(-1).numpy(), purpose, index_words.reshape(-1))
    return torch.from_numpy(words[0]).reshape(seed.shape), torch.from_numpy(words[1]).reshape(seed.shape)


def _counter_words(seed: Words, position: Words, purpose: int, index: Words) -> tuple[Words, Words, Words, Words]:
    zero = seed & 0
    return philox4x32(
        position & _MASK, (index & _MASK) + zero, zero + purpose, (position >> 32) & _MASK, seed & _MASK, (seed >> 32) & _MASK
    )


def _check(seed: torch.Tensor, position: torch.Tensor, index: torch.Tensor | int) -> None:
    tensors = {"seed": seed, "position": position} | ({"index": index} if isinstance(index, torch.Tensor) else {})
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int64:
            raise ValueError(f"{name} has dtype {tensor.dtype}, but named draws need torch.int64: convert it with .to(torch.int64)")
        if tensor.shape != seed.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but seed has {tuple(seed.shape)}: give one entry per draw")
    if isinstance(index, int) and not 0 <= index <= _MASK:
        raise ValueError(f"index is {index}, but it must be in [0, 2^32): it is one 32-bit counter word")
