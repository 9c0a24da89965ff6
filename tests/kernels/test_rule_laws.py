"""Exact laws: sum over all drafts and all coin patterns in float64, and compare with the target's own law.

The mutations at the end are the known ways to get a rule wrong; each must be seen by the same sums.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from specdec.kernels.rules import BLOCK, STANDARD, Problem, Rule, block_weights, emission_law, fly_rule, synthetic_rule, typical_rule

Model = Callable[[tuple[int, ...]], torch.Tensor]  # prefix -> law [V] of the next token
EXACT = 1e-12


def random_model(vocab: int, *, seed: int, zeros: float = 0.0) -> Model:
    """A law that depends on the whole prefix; a share `zeros` of its entries is exactly zero."""

    def law(prefix: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((seed, prefix)) % 2**31)
        mass = torch.rand(vocab, generator=generator, dtype=torch.float64) ** 2
        keep = torch.rand(vocab, generator=generator) >= zeros
        mass = mass * keep if bool((mass * keep).sum() > 0) else mass
        return mass / mass.sum()

    return law


def one_hot_model(base: Model) -> Model:
    """The argmax draft: certain, and a function of the prefix."""
    return lambda prefix: torch.nn.functional.one_hot(base(prefix).argmax(), base(prefix).numel()).double()


def path_probability(model: Model, tokens: tuple[int, ...]) -> float:
    chance = 1.0
    for i, token in enumerate(tokens):
        chance *= float(model(tokens[:i])[token])
    return chance


def problem_at(target: Model, draft: Model, drafts: tuple[int, ...]) -> Problem:
    p = torch.stack([target(drafts[:i]) for i in range(len(drafts) + 1)])
    q = torch.stack([draft(drafts[:i]) for i in range(len(drafts))]) if drafts else p[:0]
    return Problem(p, q, list(drafts))


def stream_law(
    rule: Rule, target: Model, draft: Model, *, vocab: int, num_drafts: int, law_of=emission_law
) -> dict[tuple[int, ...], float]:
    """Law of the first K+1 tokens: what one verified step emits, continued by the target."""
    stream: dict[tuple[int, ...], float] = {}
    for drafts in product(range(vocab), repeat=num_drafts):
        drafted = path_probability(draft, drafts)
        if drafted == 0.0:
            continue
        for emitted, chance in law_of(rule, problem_at(target, draft, drafts)).items():
            for rest in product(range(vocab), repeat=num_drafts + 1 - len(emitted)):
                tokens = (*emitted, *rest)
                tail = path_probability(target, tokens) / path_probability(target, emitted) if path_probability(target, emitted) else 1.0
                stream[tokens] = stream.get(tokens, 0.0) + drafted * chance * (tail if rest else 1.0)
    return stream


def distance(stream: dict[tuple[int, ...], float], target: Model, *, vocab: int, length: int) -> float:
    """Total variation between a stream's law and the target's."""
    every = product(range(vocab), repeat=length)
    return 0.5 * sum(abs(stream.get(tokens, 0.0) - path_probability(target, tokens)) for tokens in every)


def stepwise(law: torch.Tensor) -> Model:
    return lambda prefix: law


P = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
Q = torch.tensor([0.1, 0.6, 0.2, 0.1], dtype=torch.float64)
PAIRS = {
    "unrelated": lambda v: (random_model(v, seed=1), random_model(v, seed=2)),
    "equal": lambda v: (random_model(v, seed=3), random_model(v, seed=3)),
    "with zeros": lambda v: (random_model(v, seed=4, zeros=0.4), random_model(v, seed=5, zeros=0.4)),
    "uniform against sharp": lambda v: (stepwise(torch.full((v,), 1 / v, dtype=torch.float64)), random_model(v, seed=6, zeros=0.5)),
    "one-hot draft": lambda v: (random_model(v, seed=7), one_hot_model(random_model(v, seed=8))),
    "one-hot draft, zeros": lambda v: (random_model(v, seed=9, zeros=0.4), one_hot_model(random_model(v, seed=10))),
    "greedy target": lambda v: (one_hot_model(random_model(v, seed=11)), random_model(v, seed=12)),
    "disjoint": lambda v: (
        stepwise(torch.nn.functional.one_hot(torch.tensor(0), v).double()),
        stepwise(torch.nn.functional.one_hot(torch.tensor(v - 1), v).double()),
    ),
}


@pytest.mark.parametrize("rule", [STANDARD, BLOCK], ids=["standard", "block"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("vocab", "num_drafts"), [(4, 1), (4, 2), (3, 3), (2, 0)])
def test_lossless_rules_emit_the_targets_law(rule: Rule, pair: str, vocab: int, num_drafts: int) -> None:
    target, draft = PAIRS[pair](vocab)
    stream = stream_law(rule, target, draft, vocab=vocab, num_drafts=num_drafts)
    assert distance(stream, target, vocab=vocab, length=num_drafts + 1) < EXACT
    assert sum(stream.values()) == pytest.approx(1.0, abs=EXACT)


def expected_accepted(rule: Rule, target: Model, draft: Model, *, vocab: int, num_drafts: int) -> float:
    total = 0.0
    for drafts in product(range(vocab), repeat=num_drafts):
        law = emission_law(rule, problem_at(target, draft, drafts))
        total += path_probability(draft, drafts) * sum(chance * (len(emitted) - 1) for emitted, chance in law.items())
    return total


def test_block_accepts_what_the_published_example_says() -> None:
    target = stepwise(torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    draft = stepwise(torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))
    assert expected_accepted(STANDARD, target, draft, vocab=2, num_drafts=2) == pytest.approx(10 / 9, abs=EXACT)
    assert expected_accepted(BLOCK, target, draft, vocab=2, num_drafts=2) == pytest.approx(11 / 9, abs=EXACT)


@pytest.mark.parametrize("pair", PAIRS)
def test_block_never_accepts_fewer(pair: str) -> None:
    target, draft = PAIRS[pair](3)
    standard, block = (expected_accepted(rule, target, draft, vocab=3, num_drafts=3) for rule in (STANDARD, BLOCK))
    assert block >= standard - EXACT
    if "one-hot" in pair or "greedy" in pair:
        assert block == pytest.approx(standard, abs=EXACT)


def test_acceptance_of_one_draft_is_the_overlap_of_the_laws() -> None:
    accepted = expected_accepted(STANDARD, stepwise(P), stepwise(Q), vocab=4, num_drafts=1)
    assert accepted == pytest.approx(float(torch.minimum(P, Q).sum()), abs=EXACT) == pytest.approx(0.6)


def test_a_sampled_draft_judged_as_certain_is_exact_but_slower() -> None:
    def certain(rule: Rule, problem: Problem) -> dict[tuple[int, ...], float]:
        q = torch.nn.functional.one_hot(torch.tensor(problem.drafts), problem.p.shape[1]).double()
        return emission_law(rule, problem._replace(q=q))

    stream = stream_law(STANDARD, stepwise(P), stepwise(Q), vocab=4, num_drafts=1, law_of=certain)
    assert distance(stream, stepwise(P), vocab=4, length=2) < EXACT


# ---------------------------------------------------------------- lossy rules: what they promise instead


def test_synthetic_acceptance_follows_its_rates() -> None:
    target, draft = PAIRS["unrelated"](3)
    rates = [0.9, 0.5, 0.25]
    mean = expected_accepted(synthetic_rule(rates), target, draft, vocab=3, num_drafts=3)
    assert mean == pytest.approx(0.9 + 0.9 * 0.5 + 0.9 * 0.5 * 0.25, abs=EXACT)


def test_typical_is_the_greedy_rule_for_a_greedy_target() -> None:
    target, draft = PAIRS["greedy target"](4)
    stream = stream_law(typical_rule(epsilon=0.09, delta=0.3), target, draft, vocab=4, num_drafts=2)
    assert distance(stream, target, vocab=4, length=3) < EXACT


def test_typical_keeps_what_is_above_its_bar_and_nothing_below() -> None:
    flat = torch.full((4,), 0.25, dtype=torch.float64)  # bar = min(.09, .3 * 1/4) = .075
    peaked = torch.tensor([0.92, 0.04, 0.03, 0.01], dtype=torch.float64)  # entropy .36, bar .09
    rule = typical_rule(epsilon=0.09, delta=0.3)
    assert rule.coins(problem_at(stepwise(flat), stepwise(flat), (3,))) == [1.0]
    assert rule.coins(problem_at(stepwise(peaked), stepwise(peaked), (1,))) == [0.0]


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ([True, True, True, True], 4),
        ([False, True, True, True], 4),  # held, then the window of two is accepted, then the rest
        ([False, True, False, True], 0),  # refused inside the window
        ([True, False, True, True], 4),
        ([True, True, False, True], 2),  # no room for the window: index 2 + 2 is not below 4
        ([False, False, True, True], 0),
    ],
)
def test_fly_holds_a_refused_draft_only_with_room_and_doubt(pattern: list[bool], kept: int) -> None:
    doubt = torch.full((5, 4), 0.25, dtype=torch.float64)
    problem = Problem(doubt, doubt[:4], [0, 1, 2, 3])
    assert fly_rule(doubt, window=2, entropy_threshold=0.3, entropy_top_k=3).length(problem, pattern) == kept
    leading = pattern.index(False) if False in pattern else 4
    assert fly_rule(doubt, window=2, entropy_threshold=5.0, entropy_top_k=3).length(problem, pattern) == leading


def test_fly_never_holds_an_impossible_draft() -> None:
    gate = torch.tensor([[0.5, 0.5, 0.0]] * 4, dtype=torch.float64)
    problem = Problem(gate, gate[:3], [2, 0, 1])
    assert fly_rule(gate, window=1, entropy_threshold=0.3, entropy_top_k=3).length(problem, [False, True, True]) == 0


# ---------------------------------------------------------------- mutations: each must be seen


def _from_p(problem: Problem, kept: int) -> torch.Tensor:
    return problem.p[kept]


def _coins_by_p(problem: Problem) -> list[float]:
    return [float(problem.p[i, draft]) for i, draft in enumerate(problem.drafts)]


def _bonus_off_by_one(problem: Problem, kept: int) -> torch.Tensor:
    return problem.p[kept - 1] if kept == len(problem.drafts) else STANDARD.recovered(problem, kept)


def _block_coins_with(problem: Problem, *, row_shift: int, last_from_formula: bool) -> list[float]:
    weights, coins, n = block_weights(problem), [], len(problem.drafts)
    for i in range(1, n + 1):
        row = min(i - row_shift, n - 1)
        mass = float((weights[i] * problem.p[row] - problem.q[row]).clamp_min(0.0).sum())
        rest = mass + 1.0 - weights[i]
        coins.append(mass / rest if rest > 0 else 1.0)
    return coins if last_from_formula else [*coins[:-1], weights[-1]]


def _without_weight(problem: Problem, kept: int) -> torch.Tensor:
    rest = (problem.p[kept] - problem.q[kept]).clamp_min(0) if kept < len(problem.drafts) else problem.p[kept]
    return rest if float(rest.sum()) > 0 else problem.p[kept]


def _argmax_judged_by_softmax(rule: Rule, problem: Problem) -> dict[tuple[int, ...], float]:
    soft = torch.stack([random_model(problem.p.shape[1], seed=8)(tuple(problem.drafts[:i])) for i in range(len(problem.drafts))])
    return emission_law(rule, problem._replace(q=soft))


MUTANTS = {
    "residual drawn from p": STANDARD._replace(recovered=_from_p),
    "sampled draft judged by p alone": STANDARD._replace(coins=_coins_by_p),
    "bonus row off by one": STANDARD._replace(recovered=_bonus_off_by_one),
    "block: mass at row i, not i+1": BLOCK._replace(coins=lambda problem: _block_coins_with(problem, row_shift=1, last_from_formula=False)),
    "block: last coin from the formula": BLOCK._replace(
        coins=lambda problem: _block_coins_with(problem, row_shift=0, last_from_formula=True)
    ),
    "block: residual without its weight": BLOCK._replace(recovered=_without_weight),
    "block: the first refusal stops": BLOCK._replace(length=STANDARD.length),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_sums_see_each_known_mistake(mutant: str) -> None:
    target, draft = PAIRS["unrelated"](3)
    stream = stream_law(MUTANTS[mutant], target, draft, vocab=3, num_drafts=3)
    assert distance(stream, target, vocab=3, length=4) > 1e-3


def test_mistakes_have_their_published_size() -> None:
    def error(rule: Rule) -> float:
        return distance(stream_law(rule, stepwise(P), stepwise(Q), vocab=4, num_drafts=1), stepwise(P), vocab=4, length=2)

    assert error(MUTANTS["residual drawn from p"]) == pytest.approx(0.20, abs=5e-3)
    assert error(MUTANTS["sampled draft judged by p alone"]) == pytest.approx(0.33, abs=5e-3)


def test_an_argmax_draft_judged_by_its_softmax_is_seen() -> None:
    target, draft = PAIRS["one-hot draft"](4)
    stream = stream_law(STANDARD, target, draft, vocab=4, num_drafts=2, law_of=_argmax_judged_by_softmax)
    assert distance(stream, target, vocab=4, length=3) > 1e-2


def test_drafts_cut_by_their_own_probability_are_seen() -> None:
    """Keep the draft only when it is token 0: the law becomes (.85, .15) instead of (.7, .3)."""
    target, draft = stepwise(torch.tensor([0.7, 0.3], dtype=torch.float64)), stepwise(torch.tensor([0.5, 0.5], dtype=torch.float64))

    def anticipating(rule: Rule, problem: Problem) -> dict[tuple[int, ...], float]:
        kept = problem if problem.drafts == [0] else Problem(problem.p[:1], problem.q[:0], [])
        return emission_law(rule, kept)

    stream = stream_law(STANDARD, target, draft, vocab=2, num_drafts=1, law_of=anticipating)
    assert sum(chance for tokens, chance in stream.items() if tokens[0] == 0) == pytest.approx(0.85, abs=EXACT)
