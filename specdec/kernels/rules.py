"""Verification rules as probabilities: what each coin says, what a pattern keeps, and the law of the token after it.

Owns: the mathematics of acceptance, in float64 and exact, for one request. Must not know: batches, random numbers, devices.
Read next: reference.py, which flips the coins. Letters: n drafts of one request, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch


class Problem(NamedTuple):
    """One request's verification. p [n+1, V] and q [n, V] are float64 laws, drafts n ids; one-hot drafts have one-hot q rows."""

    p: torch.Tensor
    q: torch.Tensor
    drafts: list[int]


class Rule(NamedTuple):
    """How a verification rule decides.

    coins(problem) -> [n] probability that coin i says yes. length(problem, pattern) -> how many drafts a pattern keeps.
    recovered(problem, t) -> [V] mass of the token emitted after t drafts (need not sum to 1).
    """

    coins: Callable[[Problem], list[float]]
    length: Callable[[Problem, list[bool]], int]
    recovered: Callable[[Problem, int], torch.Tensor]


def emission_law(rule: Rule, problem: Problem) -> dict[tuple[int, ...], float]:
    """Return the exact law of the emitted tokens (kept drafts and one more) given the drafts: the sum over all coin patterns."""
    law: dict[tuple[int, ...], float] = {}
    coins = rule.coins(problem)
    for pattern in product((True, False), repeat=len(coins)):
        chance = 1.0
        for says_yes, coin in zip(pattern, coins, strict=True):
            chance *= coin if says_yes else 1.0 - coin
        if chance <= 0.0:
            continue
        kept = rule.length(problem, list(pattern))
        mass_after = rule.recovered(problem, kept)
        for token, mass in enumerate((mass_after / mass_after.sum()).tolist()):
            if mass > 0.0:
                emitted = (*problem.drafts[:kept], token)
                law[emitted] = law.get(emitted, 0.0) + chance * mass
    return law


def _leading(problem: Problem, pattern: list[bool]) -> int:
    return pattern.index(False) if False in pattern else len(pattern)


def _residual(weight: float, problem: Problem, kept: int) -> torch.Tensor:
    """(weight * p - q)+ after `kept` drafts; p itself after all of them, or where p is covered by q up to rounding."""
    p = problem.p[kept]
    if kept == len(problem.drafts):
        return p
    rest = (weight * p - problem.q[kept]).clamp_min(0.0)
    return rest if float(rest.sum()) > 0.0 else p


def _standard_coins(problem: Problem) -> list[float]:
    """min(1, p/q) at each draft. q = 0 at a drawn token is a broken law: refuse the draft."""
    return [_ratio(problem, i) if float(problem.q[i, draft]) > 0 else 0.0 for i, draft in enumerate(problem.drafts)]


def _ratio(problem: Problem, i: int) -> float:
    draft = problem.drafts[i]
    return min(1.0, float(problem.p[i, draft]) / float(problem.q[i, draft]))


STANDARD = Rule(_standard_coins, _leading, lambda problem, kept: _residual(1.0, problem, kept))


def block_weights(problem: Problem) -> list[float]:
    """w_0 = 1, w_i = min(1, w_{i-1} p(d_i)/q(d_i)): the probability that at least i drafts are kept, given them."""
    weights = [1.0]
    for i, draft in enumerate(problem.drafts):
        q = float(problem.q[i, draft])
        weights.append(min(1.0, weights[-1] * float(problem.p[i, draft]) / q) if q > 0 else 0.0)
    return weights


def _block_coins(problem: Problem) -> list[float]:
    """h_i = S_i / (S_i + 1 - w_i) with S_i the residual mass after i drafts; the last one is w_n."""
    weights, coins = block_weights(problem), []
    for i in range(1, len(problem.drafts)):
        mass = float((weights[i] * problem.p[i] - problem.q[i]).clamp_min(0.0).sum())
        rest = mass + 1.0 - weights[i]
        coins.append(mass / rest if rest > 0.0 else 1.0)
    return [*coins, weights[-1]] if problem.drafts else []


def _last_yes(problem: Problem, pattern: list[bool]) -> int:
    return max((i + 1 for i, says_yes in enumerate(pattern) if says_yes), default=0)


BLOCK = Rule(_block_coins, _last_yes, lambda problem, kept: _residual(block_weights(problem)[kept], problem, kept))


def fly_rule(gate: torch.Tensor, *, window: int, entropy_threshold: float, entropy_top_k: int) -> Rule:
    """The rule of `fly` with gate [n+1, V], the law whose entropy says that the target is undecided."""

    def length(problem: Problem, pattern: list[bool]) -> int:
        kept, held = 0, None
        for i, says_yes in enumerate(pattern):
            if says_yes and held is None:
                kept = i + 1
            elif says_yes and held is not None and i - held == window:
                kept, held = i + 1, None
            elif not says_yes:
                if held is not None or not (i + window < len(pattern) and may_hold(problem, i)):
                    break
                held = i
        return kept

    def may_hold(problem: Problem, i: int) -> bool:
        return float(gate[i, problem.drafts[i]]) > 0.0 and top_entropy(gate[i], entropy_top_k) >= entropy_threshold

    return Rule(_standard_coins, length, STANDARD.recovered)


def top_entropy(law: torch.Tensor, top_k: int) -> float:
    """-sum p log p in nats over the top_k most likely ids of law [V], not renormalised."""
    return float(torch.special.entr(law.sort(descending=True).values[:top_k]).sum())


def typical_rule(*, epsilon: float, delta: float) -> Rule:
    """Keep d while p(d) >= min(epsilon, delta * exp(-H(p))); then the most likely token."""

    def coins(problem: Problem) -> list[float]:
        bars = [min(epsilon, delta * float(torch.exp(-torch.special.entr(row).sum()))) for row in problem.p]
        return [float(float(problem.p[i, draft]) >= bars[i]) for i, draft in enumerate(problem.drafts)]

    def recovered(problem: Problem, kept: int) -> torch.Tensor:
        mass = torch.zeros_like(problem.p[kept])
        mass[problem.p[kept].argmax()] = 1.0
        return mass

    return Rule(coins, _leading, recovered)


def synthetic_rule(rates: list[float]) -> Rule:
    """Keep draft i with probability rates[i] whatever the laws say; then a token of the target's law."""
    return Rule(lambda problem: rates[: len(problem.drafts)], _leading, lambda problem, kept: problem.p[kept])
