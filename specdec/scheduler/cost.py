"""What a step costs in seconds, learnt from the steps that were run: the target's part by rows and context, the drafter's by length.

Owns: measured curves, their priors, and the account that keeps drafting from costing more than it brings. Must not know:
acceptance, requests. Read next: goodput.py.

Rows are query rows of a step; context is the sum of the requests' computed tokens.
"""

from __future__ import annotations

from bisect import bisect_right

_STARTS = [*range(1, 17), *sorted({round(16 * 1.25**power) for power in range(1, 30)})]  # first rows of each bin: 1..16, then wider
FLAT_ROWS = 16  # the prior: up to here rows are free (weights are read once), then each adds a hundredth of a small step
EXTRA_PER_ROW = 0.01
NUM_COLD = 2  # visits of a bin whose time may be that of a first call (compilation, page faults)
COLD_FACTOR = 3.0


def prior_shape(rows: float) -> float:
    """Return the cost of a step relative to one row, before anything is measured. Optimistic: trying is how it is learnt."""
    return 1.0 + EXTRA_PER_ROW * max(rows - FLAT_ROWS, 0.0)


class Smoothed:
    """A mean that forgets slowly, starts from the least of its first four values, and does not follow a single outlier."""

    __slots__ = ("count", "mean")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0

    def add(self, value: float, *, memory: int) -> None:
        """Take in one value >= 0; `memory` is the number of values that the mean is taken over."""
        self.count += 1
        if self.count <= 4:
            self.mean = value if self.count == 1 else min(self.mean, value)
            return
        change = value - self.mean
        bound = 0.5 * self.mean
        self.mean += min(max(change, -bound), bound) / min(self.count, memory)


class _Bin:
    """Steps of about the same rows. time: seconds over the correction. raw: plain seconds, against which context is judged."""

    __slots__ = ("context", "num_cold", "raw", "rows", "time")

    def __init__(self, rows: int, context: int) -> None:
        self.time = Smoothed()
        self.rows, self.context, self.raw = float(rows), float(context), 0.0
        self.num_cold = 0


class StepCost:
    """Seconds of the target's part of a step: correction * curve(rows) + slope * context.

    The curve is isotonic over the row counts that occurred, follows the prior's shape between and beyond them, and is worked
    out by refresh(). The correction is one slow factor for everything, so that a machine that slows down changes no choice.
    """

    def __init__(self) -> None:
        self.correction = 1.0
        self.slope = 0.0  # seconds per token of context
        self._bins: dict[int, _Bin] = {}
        self._spread, self._together = 3e7, 0.0  # context squared, context times seconds; the first holds the slope near 0 at first
        self._knots: list[tuple[float, float]] = []
        self._known: dict[int, float] = {}

    def observe(self, rows: int, context: int, seconds: float) -> bool:
        """Learn from one step; False when it was set aside as a first call, which says nothing about the next."""
        index = bisect_right(_STARTS, rows)
        found = self._bins.get(index)
        if found is None:
            found = self._bins[index] = _Bin(rows, context)
        is_young = found.num_cold < NUM_COLD and found.time.count < NUM_COLD and self._knots
        if is_young and seconds > COLD_FACTOR * self.predict(rows, context):
            found.num_cold += 1
            return False
        if found.time.count >= 8:
            self._correct(found, context, seconds)
        weight = 1 / min(found.time.count + 1, 128)
        found.time.add(seconds / self.correction, memory=128)
        found.raw += weight * (seconds - found.raw)
        found.rows += weight * (rows - found.rows)
        found.context += weight * (context - found.context)
        return True

    def predict(self, rows: float, context: float) -> float:
        """Return the seconds of a step; relative to one row while nothing is measured."""
        whole = int(rows)
        low = self._base(whole)
        if rows > whole:
            low += (rows - whole) * (self._base(whole + 1) - low)
        return self.correction * low + self.slope * context

    def refresh(self) -> None:
        """Work out the curve from what was observed."""
        self.slope = max(self._together / self._spread, 0.0)
        knots = [
            (found.rows, max(found.time.mean - self.slope / self.correction * found.context, 0.2 * found.time.mean), found.time.count)
            for _, found in sorted(self._bins.items())
            if found.time.count
        ]
        self._knots = _isotonic(knots)
        self._known = {}

    def num_seen(self, rows: int) -> int:
        """Return how many steps of about this many rows were measured."""
        found = self._bins.get(bisect_right(_STARTS, rows))
        return found.time.count if found is not None else 0

    @property
    def num_bins(self) -> int:
        """How many kinds of step, by rows, were measured."""
        return len(self._bins)

    def _correct(self, found: _Bin, context: int, seconds: float) -> None:
        wide, late = context - found.context, seconds - found.raw
        bound = 0.5 * found.raw
        self._spread = 0.999 * self._spread + wide * wide
        self._together = 0.999 * self._together + wide * min(max(late, -bound), bound)
        expected = self.correction * found.time.mean + self.slope * wide
        if expected > 0:
            ratio = min(max(seconds / expected, 0.5), 2.0)
            self.correction = min(max(self.correction * (1 + 0.02 * (ratio - 1)), 0.5), 2.0)

    def _base(self, rows: int) -> float:
        value = self._known.get(rows)
        if value is None:
            value = self._known[rows] = self._curve(rows)
        return value

    def _curve(self, rows: int) -> float:
        knots = self._knots
        if not knots:
            return prior_shape(rows)
        at = bisect_right(knots, (rows, float("inf")))
        shape = prior_shape(rows)
        if at == 0 or at == len(knots):
            near_rows, near = knots[min(at, len(knots) - 1)]
            return near / prior_shape(near_rows) * shape
        (low_rows, low), (high_rows, high) = knots[at - 1], knots[at]
        share = (rows - low_rows) / (high_rows - low_rows)
        ratio = low / prior_shape(low_rows) * (1 - share) + high / prior_shape(high_rows) * share
        return min(max(ratio * shape, low), high)


def _isotonic(knots: list[tuple[float, float, int]]) -> list[tuple[float, float]]:
    """Return (rows, seconds) where more rows never cost less: neighbours in the wrong order share their weighted mean."""
    blocks: list[list[float]] = []  # value, weight, number of knots
    for _, value, weight in knots:
        blocks.append([value, float(weight), 1.0])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            value, weight_, num = blocks.pop()
            last = blocks[-1]
            last[0] = (last[0] * last[1] + value * weight_) / (last[1] + weight_)
            last[1] += weight_
            last[2] += num
    values = [block[0] for block in blocks for _ in range(int(block[2]))]
    return [(rows, value) for (rows, _, _), value in zip(knots, values, strict=True)]


class DraftCost:
    """Seconds that the drafter takes by the longest draft ordered, 0 included (keeping its state up to date), per size of batch.

    Lengths that were never ordered are interpolated, and beyond the longest extrapolated in proportion.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, dict[int, Smoothed]] = {}  # by the power of two that the number of requests reaches

    def observe(self, num_requests: int, longest: int, seconds: float) -> None:
        """Learn from one step in which drafts of at most `longest` were ordered from `num_requests` requests."""
        lengths = self._sizes.setdefault(num_requests.bit_length(), {})
        found = lengths.get(longest)
        if found is None:
            found = lengths[longest] = Smoothed()
        found.add(seconds, memory=32)

    def predict(self, num_requests: int, longest: int) -> float:
        """Return the seconds of drafting, 0 while nothing is measured."""
        if not self._sizes:
            return 0.0
        size = num_requests.bit_length()
        lengths = self._sizes.get(size) or self._sizes[min(self._sizes, key=lambda known: abs(known - size))]
        found = lengths.get(longest)
        if found is not None:
            return found.mean
        below = max((length for length in lengths if length < longest), default=None)
        above = min((length for length in lengths if length > longest), default=None)
        start = lengths[below].mean if below is not None else 0.0
        if above is not None:
            left = below or 0
            return start + (longest - left) / (above - left) * max(lengths[above].mean - start, 0.0)
        idle = lengths[0].mean if 0 in lengths else 0.0
        return idle + max(start - idle, 0.0) * longest / below if below else idle


class Bank:
    """The account of drafting against plain decoding, in seconds.

    Each step with drafts pays in what plain decoding would have taken for its tokens and draws what it took. Old gains beyond
    `cap_s` are dropped, so they cannot pay for later losses; `income` of all elapsed time is given, to pay for trying again.
    Hence wall time is at most (1 + income) of plain decoding's plus the floor and two steps' loss, as far as the cost of a
    plain step is known.
    """

    def __init__(self, *, floor_s: float = 0.02, cap_s: float = 0.25, income: float = 0.005) -> None:
        self.balance_s = 0.0
        self.floor_s, self.cap_s = floor_s, cap_s
        self._income = income

    def settle(self, plain_s: float, wall_s: float) -> None:
        """Enter one step with drafts."""
        self.balance_s = min(self.balance_s + plain_s - wall_s, self.cap_s)

    def earn(self, elapsed_s: float) -> None:
        """Enter the income of time that passed."""
        self.balance_s = min(self.balance_s + self._income * elapsed_s, self.cap_s)

    @property
    def is_exhausted(self) -> bool:
        """True when nothing may be risked any more."""
        return self.balance_s <= -self.floor_s
