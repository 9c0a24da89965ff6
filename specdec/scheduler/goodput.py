"""Goodput: the draft lengths that bring the most tokens per second of the whole step, requests competing for the same rows.

Owns: the search. Must not know: where outlooks and costs come from. Read next: adaptive.py.

Drafts are admitted in order of value (the probability of being kept once drafted), best first, whoever they belong to. A
choice is therefore a price and a longest length: every request drafts as far as its values reach the price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log1p

from specdec.scheduler.acceptance import Outlook
from specdec.scheduler.cost import DraftCost, StepCost

NUM_PRICES = 48
FREE_DRAFTING = 0.005  # share of a step below which the drafter's own time does not decide the length


@dataclass(frozen=True, slots=True)
class Candidate:
    """One request of the step: its outlook and how many drafts it allows."""

    outlook: Outlook
    limit: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to draft. price: least value admitted, in NUM_PRICES-ths. longest: no draft is longer. rate: tokens per second."""

    price: int
    longest: int
    rate: float


@dataclass(frozen=True, slots=True)
class Load:
    """The step to decide for. num_requests: all that decode, those that may not draft included. context: tokens.

    bonus: tokens that the drafting pass itself brings per request that drafts.
    """

    num_requests: int
    context: float
    step_cost: StepCost
    draft_cost: DraftCost
    bonus: float = 0.0

    def rate(self, num_tokens: float, num_rows: float, *, log_none: float, longest: int) -> float:
        """Return tokens per second when drafts bring `num_tokens` over `num_rows` rows; log_none: of the chance of no draft at all."""
        draft_s = self.draft_cost.predict(self.num_requests, longest)
        return (self.num_requests + num_tokens) / (self.step_s(num_rows, log_none, self.plain_s()) + draft_s)

    def step_s(self, num_rows: float, log_none: float, plain_s: float) -> float:
        """Return the seconds of the target's part with `num_rows` rows of drafts.

        Steps without any draft cost what plain ones do, so the rows come in the remaining steps: for one request with a
        lookup that seldom finds something, that is the difference between seldom 9 rows and always 2.
        """
        some = 1 - exp(log_none)
        if some < 1e-9:
            return plain_s
        return plain_s + some * (self.step_cost.predict(self.num_requests + num_rows / some, self.context) - plain_s)

    def plain_s(self) -> float:
        """Return the seconds of the target's part of a plain step."""
        return self.step_cost.predict(self.num_requests, self.context)

    def plain_rate(self) -> float:
        """Return tokens per second without drafts."""
        return self.rate(0.0, 0.0, log_none=0.0, longest=0)


def drafts_at(candidate: Candidate, *, price: int, longest: int) -> int:
    """Return how many drafts a request gets at a price."""
    least = price / NUM_PRICES
    num = 0
    for value in candidate.outlook.values[: min(candidate.limit, longest)]:
        if value < least:
            break
        num += 1
    return num


def rate_of(load: Load, candidates: Sequence[Candidate], lengths: Sequence[int]) -> float:
    """Return the rate of given draft lengths, one per candidate."""
    num_tokens = num_rows = log_none = 0.0
    for candidate, length in zip(candidates, lengths, strict=True):
        if length:
            outlook = candidate.outlook
            num_tokens += sum(outlook.tokens[:length]) + load.bonus
            num_rows += sum(outlook.rows[:length])
            log_none += log1p(-min(outlook.rows[0], 1 - 1e-12))
    return load.rate(num_tokens, num_rows, log_none=log_none, longest=max(lengths, default=0))


def best_choice(load: Load, candidates: Sequence[Candidate], max_nodes: int) -> Choice | None:
    """Return the best way to draft at all, even where plain decoding is better; None when nobody may draft."""
    limit = min(max((candidate.limit for candidate in candidates), default=0), max_nodes)
    if limit == 0:
        return None
    best: Choice | None = None
    num_worse = 0
    for longest in _lengths(load, limit):
        found = _best_price(load, candidates, longest)
        if best is None or found.rate > best.rate:
            best, num_worse = found, 0
        else:
            num_worse += 1
            if num_worse == 2:  # each further draft brings less and costs as much
                break
    return best


def _lengths(load: Load, limit: int) -> tuple[int, ...]:
    """Longest lengths worth telling apart: one, where drafting takes no time."""
    num, draft = load.num_requests, load.draft_cost
    if draft.predict(num, limit) - draft.predict(num, 1) <= FREE_DRAFTING * load.step_cost.predict(num, load.context):
        return (limit,)
    return (*(length for length in (*range(1, 9), 10, 12, 16, 24, 32, 48) if length < limit), limit)


def _best_price(load: Load, candidates: Sequence[Candidate], longest: int) -> Choice:
    tokens, rows, none = [0.0] * (NUM_PRICES + 1), [0.0] * (NUM_PRICES + 1), [0.0] * (NUM_PRICES + 1)
    for candidate in candidates:
        outlook = candidate.outlook
        for index in range(min(candidate.limit, longest)):
            price = int(outlook.values[index] * NUM_PRICES)
            tokens[price] += outlook.tokens[index]
            rows[price] += outlook.rows[index]
            if index == 0:
                tokens[price] += load.bonus
                none[price] += log1p(-min(outlook.rows[0], 1 - 1e-12))
    plain_s, draft_s = load.plain_s(), load.draft_cost.predict(load.num_requests, longest)
    num_tokens, num_rows, log_none = float(load.num_requests), 0.0, 0.0
    best_price, best_rate = 0, 0.0
    for price in range(NUM_PRICES, -1, -1):
        if not rows[price]:
            continue
        num_tokens += tokens[price]
        num_rows += rows[price]
        log_none += none[price]
        rate = num_tokens / (load.step_s(num_rows, log_none, plain_s) + draft_s)
        if rate > best_rate:
            best_price, best_rate = price, rate
    return Choice(best_price, longest, best_rate)
