"""AcceptanceBook: how often each source's drafts come true, lately, per request and over all requests.

Owns: running estimates of conditional acceptance. Must not know: how drafts are made or chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

FORGET = 0.9  # weight of the past at each observation: about the last ten steps count
FADE = 0.98  # weight at each step in which another source was tested, so that a source that failed once is tried again
PRIOR_RATE, PRIOR_WEIGHT = 0.5, 4.0


@dataclass(slots=True)
class _Count:
    """Decayed numbers of drafts that were reached by verification, and of those among them that came true."""

    reached: float = 0.0
    accepted: float = 0.0

    def add(self, reached: int, accepted: int) -> None:
        self.reached = self.reached * FORGET + reached
        self.accepted = self.accepted * FORGET + accepted

    def fade(self) -> None:
        self.reached *= FADE
        self.accepted *= FADE

    def rate(self, prior: float) -> float:
        return (self.accepted + PRIOR_WEIGHT * prior) / (self.reached + PRIOR_WEIGHT)


@dataclass(slots=True)
class AcceptanceBook:
    """Rates by source, a request's own where it has some: a draft is reached if all before it were accepted."""

    num_sources: int
    _overall: list[_Count] = field(init=False)
    _by_row: dict[int, list[_Count]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._overall = [_Count() for _ in range(self.num_sources)]

    def forget(self, rows: Sequence[int]) -> None:
        """The rows belong to somebody else now."""
        for row in rows:
            self._by_row.pop(row, None)

    def observe(self, row: int, source: int, *, tested: int, accepted: int) -> None:
        """Enter a verification of `tested` drafts of a source, of which the first `accepted` were kept."""
        reached = min(accepted + 1, tested)
        counts = self._by_row.setdefault(row, [_Count() for _ in range(self.num_sources)])
        for index, count in enumerate(counts):
            if index == source:
                count.add(reached, accepted)
            else:
                count.fade()
        self._overall[source].add(reached, accepted)

    def rate(self, row: int, source: int) -> float:
        """Return the estimated probability that one more draft of the source is accepted."""
        overall = self._overall[source].rate(PRIOR_RATE)
        counts = self._by_row.get(row)
        return overall if counts is None else counts[source].rate(overall)


def expected_accepted(chances: Sequence[float]) -> float:
    """Return the expected number of accepted drafts of a chain whose drafts are accepted with these conditional chances."""
    expected, path = 0.0, 1.0
    for chance in chances:
        path *= chance
        expected += path
    return expected
