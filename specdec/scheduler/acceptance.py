"""Acceptance of drafts, estimated while serving: per position and source, each request shrunk towards what all requests show.

Owns: decayed counts and the outlook of one request. Must not know: costs, or how a draft length is chosen (goodput.py).

Two rates per position i. *Conditional acceptance* c_i: draft i was kept, given that it was tested and all before it were
kept. *Existence* e_i: the drafter had an i-th draft, given that i were ordered and it had the one before; lookups often
find nothing. Both are observed only where a draft was really tried, so short drafts teach nothing about long ones: deeper
positions lean on the position before them.
"""

from __future__ import annotations

from dataclasses import dataclass

GLOBAL_MEMORY = 1024  # verifications after which an old one weighs half
REQUEST_MEMORY = 256
ACCEPTANCE_PRIOR = 24.0  # verifications that a request needs before its own record weighs as much as everybody's
EXISTENCE_PRIOR = 8.0  # whether a lookup finds something differs more between requests
DEPTH_PRIOR = 4.0  # the same, for a position against the one before it
FIRST_ACCEPTANCE = 0.6  # of a drafter that nobody has seen yet
FIRST_EXISTENCE = 0.9


class Tally:
    """Counts of one source, for one request or for all. Positions are 1-based; slot 0 is unused.

    tries and hits: drafts tested with all before them kept, and those of them kept. asked and found: drafts ordered with
    all before them found, and those of them found. All four are decayed; what came since the last fold() is not in them.
    """

    __slots__ = ("_drafted", "_kept", "_reached", "_wanted", "asked", "found", "hits", "num_fresh", "tries")

    def __init__(self, max_nodes: int) -> None:
        self.tries, self.hits, self.asked, self.found = ([0.0] * (max_nodes + 1) for _ in range(4))
        self._reached, self._kept, self._wanted, self._drafted = ([0] * (max_nodes + 1) for _ in range(4))
        self.num_fresh = 0

    def add(self, num_ordered: int, num_drafts: int, *, num_verified: int) -> None:
        """Count one verification. num_verified <= num_drafts <= num_ordered <= max_nodes."""
        self._reached[num_verified + 1 if num_verified < num_drafts else num_drafts] += 1
        self._kept[num_verified] += 1
        self._wanted[num_drafts + 1 if num_drafts < num_ordered else num_ordered] += 1
        self._drafted[num_drafts] += 1
        self.num_fresh += 1

    def fold(self, memory: int, *, into: Tally | None = None) -> None:
        """Move what is new into the decayed counts, and count it as new in `into` too."""
        if not self.num_fresh:
            return
        keep = memory / (memory + self.num_fresh)
        mine = ((self.tries, self._reached), (self.hits, self._kept), (self.asked, self._wanted), (self.found, self._drafted))
        for decayed, fresh in mine:
            num_here_or_deeper = 0
            for position in range(len(fresh) - 1, 0, -1):
                num_here_or_deeper += fresh[position]
                decayed[position] = decayed[position] * keep + num_here_or_deeper
        if into is not None:
            theirs = (into._reached, into._kept, into._wanted, into._drafted)
            for (_, fresh), other in zip(mine, theirs, strict=True):
                for position, count in enumerate(fresh):
                    if count:
                        other[position] += count
            into.num_fresh += self.num_fresh
        for _, fresh in mine:
            fresh[:] = [0] * len(fresh)
        self.num_fresh = 0

    def forget(self, num_kept: float) -> None:
        """Weaken the past so that it weighs at most `num_kept` verifications: the source has changed."""
        if self.asked[1] <= num_kept:
            return
        factor = num_kept / self.asked[1]
        for counts in (self.tries, self.hits, self.asked, self.found):
            counts[:] = [count * factor for count in counts]


@dataclass(frozen=True, slots=True)
class Rates:
    """Conditional acceptance and existence of one source by position, entry 0 for the first draft."""

    acceptance: list[float]
    existence: list[float]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a request may expect of its next drafts, entry 0 for the first.

    tokens: probability that the draft exists and is kept. rows: that it exists. values: tokens over rows, never rising.
    """

    tokens: list[float]
    rows: list[float]
    values: list[float]


def global_rates(tally: Tally) -> Rates:
    """Return the rates of all requests together; a position hardly tried takes the rate of the one before it."""
    acceptance, existence = [], []
    accepted, exists = FIRST_ACCEPTANCE, FIRST_EXISTENCE
    for position in range(1, len(tally.tries)):
        accepted = (tally.hits[position] + DEPTH_PRIOR * accepted) / (tally.tries[position] + DEPTH_PRIOR)
        exists = (tally.found[position] + DEPTH_PRIOR * exists) / (tally.asked[position] + DEPTH_PRIOR)
        acceptance.append(accepted)
        existence.append(exists)
        if position == 1:
            exists = FIRST_EXISTENCE  # a lookup that found a first token mostly has a second, however seldom it finds one
    return Rates(acceptance, existence)


def outlook_of(rates: Rates) -> Outlook:
    """Return the outlook of a request that has no record yet."""
    tokens, rows, values = [], [], []
    value = row = 1.0
    for accepted, exists in zip(rates.acceptance, rates.existence, strict=True):
        value *= accepted
        row *= exists
        tokens.append(value * row)
        rows.append(row)
        values.append(value)
    return Outlook(tokens, rows, values)


def request_outlook(tally: Tally, rates: Rates) -> Outlook:
    """Return the outlook of a request with a record, shrunk towards everybody's rates."""
    tokens, rows, values = [], [], []
    value = row = 1.0
    tries, hits, asked, found = tally.tries, tally.hits, tally.asked, tally.found
    for position, accepted in enumerate(rates.acceptance, 1):
        exists = rates.existence[position - 1]
        value *= (hits[position] + ACCEPTANCE_PRIOR * accepted) / (tries[position] + ACCEPTANCE_PRIOR)
        row *= (found[position] + EXISTENCE_PRIOR * exists) / (asked[position] + EXISTENCE_PRIOR)
        tokens.append(value * row)
        rows.append(row)
        values.append(value)
    return Outlook(tokens, rows, values)


def mixed(parts: list[tuple[float, Outlook]]) -> Outlook:
    """Return the outlook of a request whose drafts come from several sources, each with its weight > 0."""
    if len(parts) == 1:
        return parts[0][1]
    total = sum(weight for weight, _ in parts)
    length = len(parts[0][1].tokens)
    tokens, rows = [0.0] * length, [0.0] * length
    for weight, outlook in parts:
        share = weight / total
        for index in range(length):
            tokens[index] += share * outlook.tokens[index]
            rows[index] += share * outlook.rows[index]
    values, value = [], 1.0
    for token, row in zip(tokens, rows, strict=True):
        value = min(value, token / row if row > 0 else 0.0)
        values.append(value)
    return Outlook(tokens, rows, values)


class Surprise:
    """Watches whether verification still does what the rates say: sums of kept drafts against their expectation.

    A window of verifications is surprising when it is far off both by chance (`limit` standard deviations) and by size (a
    quarter): requests come and go, and their mean always moves a little.
    """

    __slots__ = ("_kept", "_least", "_limit", "_mean", "_means", "_num", "_spread", "_variances", "_window")

    def __init__(self, max_nodes: int, *, limit: float = 4.0, least: int = 8, window: int = 32) -> None:
        self._limit, self._least, self._window = limit, least, window
        self._means, self._variances = [0.0] * (max_nodes + 1), [0.0] * (max_nodes + 1)
        self._num = self._kept = 0
        self._mean = self._spread = 0.0

    def expect(self, rates: Rates) -> None:
        """Start a window under these rates. Entry n of the tables is for n drafts tested."""
        survival, mean, square = 1.0, 0.0, 0.0
        for position, accepted in enumerate(rates.acceptance, 1):
            survival *= accepted
            mean += survival
            square += (2 * position - 1) * survival
            self._means[position], self._variances[position] = mean, square - mean * mean
        self._num = self._kept = 0
        self._mean = self._spread = 0.0

    def add(self, num_drafts: int, num_verified: int) -> None:
        """Count one verification that had drafts."""
        self._num += 1
        self._kept += num_verified
        self._mean += self._means[num_drafts]
        self._spread += self._variances[num_drafts]

    @property
    def is_over(self) -> bool:
        """True when the window has not begun, is full, or has surprised."""
        return self._num == 0 or self._num >= self._window or self.is_surprised

    @property
    def is_surprised(self) -> bool:
        """True when chance does not explain what was seen since expect()."""
        if self._num < self._least:
            return False
        off = self._kept - self._mean
        return off * off > self._limit * self._limit * (self._spread + 0.05 * self._num) and abs(off) > 0.25 * self._mean
