"""The probability integral transform of generated text (Rosenblatt 1952): uniform numbers if, and only if, the law is kept.

Owns: the transform and its tests. Must not know: how the text was made. Letters: n tokens, V vocabulary.

With the ids of a law p sorted by descending probability, U = sum of p over the ids before x, plus v * p(x) with v uniform. If x was
drawn from p given the past, U is uniform given the past, so the U of a whole text are independent and uniform, whatever it says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from specdec.tools.significance import BINS, MIN_EXPECTED, Check, normal_two_sided, uniform_bins, uniform_gap, uniform_pairs

BELOW_ONE = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class Transformed:
    """One text's tokens, [n] float64 each. surprise: -log p(x) minus the entropy of p. variance: that of -log p under p.

    slots [n] int64: place of the token in the step that emitted it; 0 follows the anchor. outside: tokens of probability 0.
    """

    u: torch.Tensor
    surprise: torch.Tensor
    variance: torch.Tensor
    slots: torch.Tensor
    outside: int


def transform(
    laws: Iterable[tuple[int, torch.Tensor]], tokens: Sequence[int], slots: Sequence[int], *, generator: torch.Generator
) -> Transformed:
    """Transform one text; `laws` yields (index of the first token, [n, V] float64).

    A token of probability 0 counts as the least likely one that has mass, so that one rounding at the edge of a cut does not
    decide alone; how many there were is kept.
    """
    parts = []
    for first, law in laws:
        x = torch.tensor(tokens[first : first + len(law)])[:, None]
        parts.append(_transform_rows(law, x, torch.rand(len(law), dtype=torch.float64, generator=generator)))
    u, surprise, variance, outside = (torch.cat(column) for column in zip(*parts, strict=True))
    return Transformed(u, surprise, variance, torch.tensor(slots), int(outside.sum()))


def _transform_rows(law: torch.Tensor, x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    p = law.gather(1, x)
    before = (law > p) | ((law == p) & (torch.arange(law.shape[1]) < x))
    u = ((law * before).sum(1) + v * p[:, 0]).clamp(0.0, BELOW_ONE)
    logs = torch.where(law > 0, law, 1.0).log()
    entropy = -(law * logs).sum(1)
    variance = ((law * logs**2).sum(1) - entropy**2).clamp_min(0.0)
    least = torch.where(law > 0, law, torch.inf).amin(1)
    outside = p[:, 0] <= 0
    surprise = -torch.where(outside, least, p[:, 0]).log() - entropy
    return u, surprise, variance, outside


def pit_checks(texts: Sequence[Transformed], *, by_slot: bool) -> list[Check]:
    """Test whether the texts follow the law: bins, largest gap, mean surprise, neighbours, pairs, and each slot where that is valid.

    by_slot: only for rules where reaching a slot depends on earlier tokens alone. Block verification looks at the token itself
    before it decides how far to go, so its slots are biased though the text is not.
    """
    u = torch.cat([text.u for text in texts])
    checks = [uniform_bins(u, "bins"), uniform_gap(u, "largest gap"), _surprise(texts), _neighbours(texts), _pairs(texts)]
    if by_slot:
        slots = torch.cat([text.slots for text in texts])
        for slot in range(int(slots.max()) + 1):
            chosen = u[slots == slot]
            if len(chosen) >= MIN_EXPECTED * BINS and len(chosen) < len(u):
                checks.append(uniform_bins(chosen, f"slot {slot}"))
    return checks


def _surprise(texts: Sequence[Transformed]) -> Check:
    """z of the total surprise; each term has mean 0 and a known variance, given the past."""
    total = float(sum(text.surprise.sum() for text in texts))
    variance = float(sum(text.variance.sum() for text in texts))
    z = total / math.sqrt(variance) if variance > 0 else (0.0 if abs(total) < 1e-6 else math.inf)
    return Check("surprise", z, normal_two_sided(z), sum(len(text.u) for text in texts))


def _neighbours(texts: Sequence[Transformed]) -> Check:
    """z of the correlation of each U with the next one of its text."""
    products = torch.cat([(text.u[:-1] - 0.5) * (text.u[1:] - 0.5) * 12 for text in texts])
    z = float(products.sum()) / math.sqrt(max(len(products), 1))
    return Check("neighbours", z, normal_two_sided(z), len(products))


def _pairs(texts: Sequence[Transformed]) -> Check:
    """Each token with the next, no token twice: errors that depend on the token before cancel in every test of single tokens."""
    first = torch.cat([text.u[: len(text.u) // 2 * 2 : 2] for text in texts])
    second = torch.cat([text.u[1::2] for text in texts])
    return uniform_pairs(first, second, "pairs")
