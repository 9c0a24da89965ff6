"""Where speculation stops paying: from speeds beside the speed without drafts to the batch size where the gain is gone.

Owns: that arithmetic. Must not know: servers or pictures.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

OFF = "off"


@dataclass(frozen=True, slots=True)
class Curve:
    """Speed over the speed without drafts, for one workload, method and number of drafts. ratios: by requests in flight, in order."""

    workload: str
    method: str
    num_drafts: int
    ratios: Mapping[int, float]

    def stops_paying(self) -> str:
        """Return the batch size where the ratio falls through 1, in words; `> 16` where it never does, `< 1` where it never paid."""
        sizes = sorted(self.ratios)
        if self.ratios[sizes[0]] < 1:
            return f"< {sizes[0]}"
        for low, high in pairwise(sizes):
            if self.ratios[high] < 1:
                return f"{crossing((low, self.ratios[low]), (high, self.ratios[high])):.0f}"
        return f"> {sizes[-1]}"


def crossing(above: tuple[int, float], below: tuple[int, float]) -> float:
    """Return the batch size where the ratio is 1, between two measured ones, on the straight line over log(batch size) and log(ratio)."""
    (low, high_ratio), (high, low_ratio) = above, below
    share = math.log(high_ratio) / (math.log(high_ratio) - math.log(low_ratio))
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))


def curves(points: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """Return a curve for each workload, method and number of drafts, with the median over rounds of the ratio within each round.

    points: records with workload, method, round, concurrency, num_drafts (OFF for the server that never drafts) and tok_per_s.
    """
    base = {_round(point): point["tok_per_s"] for point in points if point["num_drafts"] == OFF}
    ratios: dict[tuple[str, str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        if point["num_drafts"] != OFF and base.get(_round(point)) and point["tok_per_s"]:
            key = (point["workload"], point["method"], point["num_drafts"])
            ratios[key][point["concurrency"]].append(point["tok_per_s"] / base[_round(point)])
    return [Curve(*key, {size: median(found[size]) for size in sorted(found)}) for key, found in ratios.items()]


def _round(point: Mapping[str, Any]) -> tuple[Any, ...]:
    return point["workload"], point["method"], point["concurrency"], point["round"]
