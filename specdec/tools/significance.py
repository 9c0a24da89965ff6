"""p-values of a few statistics, and what to make of many at once.

Owns: tail probabilities and Holm's rule. Must not know: where the statistics come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

BINS = 20
PAIR_BINS = 6
MIN_EXPECTED = 10.0  # observations a cell must expect before its chi-square is trusted


@dataclass(frozen=True, slots=True)
class Check:
    """One test of one hypothesis: `p_value` is the probability of a statistic at least as extreme if nothing is wrong."""

    name: str
    statistic: float
    p_value: float
    num: int  # observations


def chi_square_sf(statistic: float, df: int) -> float:
    """P(chi-square with df degrees of freedom > statistic)."""
    half = torch.tensor([df / 2, statistic / 2], dtype=torch.float64)
    tail: float = torch.special.gammaincc(half[0], half[1]).item()
    return tail


def normal_two_sided(z: float) -> float:
    """P(|standard normal| > |z|)."""
    return math.erfc(abs(z) / math.sqrt(2))


def normal_upper(z: float) -> float:
    """P(standard normal > z)."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def kolmogorov_sf(distance: float, num: int) -> float:
    """P(largest gap between an empirical and its true, continuous CDF > distance), by Kolmogorov's series with Stephens' correction."""
    root = math.sqrt(num)
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 1.0:  # the alternating series converges slowly here, its theta transform at once
        terms = (math.exp(-((2 * j - 1) ** 2) * math.pi**2 / (8 * scaled**2)) for j in range(1, 6)) if scaled > 0.04 else ()
        return min(1.0, 1.0 - math.sqrt(2 * math.pi) / max(scaled, 0.04) * sum(terms))
    return max(0.0, 2 * sum((1 if j % 2 else -1) * math.exp(-2 * j**2 * scaled**2) for j in range(1, 20)))


def uniform_bins(values: torch.Tensor, name: str) -> Check:
    """Chi-square of BINS equal bins: are values [n] uniform on [0, 1)?"""
    return _equal_cells((values * BINS).long().clamp(0, BINS - 1), BINS, name)


def uniform_pairs(first: torch.Tensor, second: torch.Tensor, name: str) -> Check:
    """Chi-square of equal squares: are the pairs (first, second), [n] each, uniform on the unit square? At most PAIR_BINS a side."""
    side = max(2, min(PAIR_BINS, math.isqrt(int(len(first) / MIN_EXPECTED))))
    columns, rows = ((values * side).long().clamp(0, side - 1) for values in (first, second))
    return _equal_cells(columns * side + rows, side * side, name)


def _equal_cells(cells: torch.Tensor, num_cells: int, name: str) -> Check:
    counts = torch.bincount(cells, minlength=num_cells).double()
    expected = len(cells) / num_cells
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return Check(name, statistic, chi_square_sf(statistic, num_cells - 1), len(cells))


def uniform_gap(values: torch.Tensor, name: str) -> Check:
    """Kolmogorov-Smirnov distance of values [n] from the uniform law."""
    ordered = values.sort().values
    steps = torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
    distance = float(torch.maximum((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))
    return Check(name, distance, kolmogorov_sf(distance, len(values)), len(values))


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Which hypotheses Holm's rule rejects: the chance that a true one is among them is at most alpha, however they depend."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    rejected = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected
