"""What the adaptive policy is made of: counts of acceptance, cost curves, the account, and the search for the best lengths."""

from __future__ import annotations

import random
from itertools import product

import pytest

from specdec.scheduler.acceptance import Outlook, Surprise, Tally, global_rates, mixed, outlook_of, request_outlook
from specdec.scheduler.cost import Bank, DraftCost, StepCost, prior_shape
from specdec.scheduler.goodput import Candidate, Load, best_choice, drafts_at, rate_of


def tally_of(*events: tuple[int, int, int], max_nodes: int = 4) -> Tally:
    """Events are (ordered, drafted, verified)."""
    tally = Tally(max_nodes)
    for ordered, drafted, verified in events:
        tally.add(ordered, drafted, num_verified=verified)
    return tally


# -- acceptance ----------------------------------------------------------------------------------------------------------


def test_positions_are_tried_only_after_all_before_them_were_kept() -> None:
    tally = tally_of((4, 4, 2), (4, 4, 4), (4, 4, 0), (4, 1, 1), (2, 0, 0))
    tally.fold(10**9)
    assert tally.tries[1:] == pytest.approx([4, 2, 2, 1], rel=1e-6)  # the fourth event ended because there was no second draft
    assert tally.hits[1:] == pytest.approx([3, 2, 1, 1], rel=1e-6)
    assert tally.asked[1:] == pytest.approx([5, 4, 3, 3], rel=1e-6)
    assert tally.found[1:] == pytest.approx([4, 3, 3, 3], rel=1e-6)


def test_folding_counts_for_everybody_once() -> None:
    totals, mine = Tally(4), tally_of((4, 4, 2), (4, 3, 3))
    mine.fold(256, into=totals)
    mine.fold(256, into=totals)
    totals.fold(1024)
    assert totals.tries[1:] == pytest.approx([2, 2, 2, 0])
    assert totals.hits[1:] == pytest.approx([2, 2, 1, 0])


def test_old_counts_weigh_half_after_as_many_verifications_as_the_memory() -> None:
    tally = tally_of(*[(1, 1, 1)] * 1000)
    tally.fold(100)
    before = tally.tries[1]
    for _ in range(100):
        tally.add(1, 1, num_verified=0)
    tally.fold(100)
    assert tally.hits[1] == pytest.approx(before / 2)


def test_rates_of_a_coin_are_found_and_depths_never_tried_lean_on_the_one_before() -> None:
    rng = random.Random(3)
    tally = Tally(6)
    for _ in range(4000):
        kept = 0
        while kept < 3 and rng.random() < 0.7:
            kept += 1
        tally.add(3, 3, num_verified=kept)
    tally.fold(10**9)
    rates = global_rates(tally)
    assert rates.acceptance[:3] == pytest.approx([0.7] * 3, abs=0.04)
    assert rates.acceptance[3:] == pytest.approx([rates.acceptance[2]] * 3)
    assert outlook_of(rates).tokens[2] == pytest.approx(0.343, abs=0.03)


def test_a_seldom_first_draft_says_nothing_against_a_second() -> None:
    tally = tally_of(*[(4, 0, 0)] * 90, *[(4, 4, 4)] * 10)
    tally.fold(10**9)
    rates = global_rates(tally)
    assert rates.existence[0] < 0.2
    assert min(rates.existence[1:]) > 0.9


def test_a_request_moves_from_everybodys_rates_to_its_own() -> None:
    rates = global_rates(tally_of())
    mine = tally_of(*[(4, 4, 0)] * 6)
    mine.fold(256)
    few = request_outlook(mine, rates).values[0]
    for _ in range(200):
        mine.add(4, 4, num_verified=0)
    mine.fold(256)
    many = request_outlook(mine, rates).values[0]
    assert rates.acceptance[0] > few > 0.4
    assert many < 0.1


def test_sources_are_weighed_by_how_often_they_draft() -> None:
    good, bad = Outlook([0.9, 0.8], [1.0, 1.0], [0.9, 0.8]), Outlook([0.1, 0.0], [1.0, 1.0], [0.1, 0.0])
    both = mixed([(3.0, good), (1.0, bad)])
    assert both.tokens == pytest.approx([0.7, 0.6])
    assert both.values == pytest.approx([0.7, 0.6])


def test_only_a_change_surprises() -> None:
    rates = global_rates(tally_of(*[(4, 4, 2)] * 50))
    alarms = 0
    for seed in range(50):
        rng, watch = random.Random(seed), Surprise(4)
        watch.expect(rates)
        for _ in range(32):
            kept = 0
            while kept < 4 and rng.random() < rates.acceptance[kept]:
                kept += 1
            watch.add(4, kept)
        alarms += watch.is_surprised
    assert alarms <= 2
    watch = Surprise(4)
    watch.expect(rates)
    for _ in range(32):
        watch.add(4, 0)
    assert watch.is_surprised


# -- cost ----------------------------------------------------------------------------------------------------------------


def test_before_any_step_the_prior_speaks() -> None:
    assert StepCost().predict(8, 100) == prior_shape(8) == prior_shape(16) < prior_shape(32)


def test_measured_steps_are_predicted_and_more_rows_never_cost_less() -> None:
    cost, rng = StepCost(), random.Random(1)
    for _ in range(400):
        rows = rng.choice([1, 5, 9, 32, 64])
        cost.observe(rows, 50, (0.01 + 0.0001 * rows) * rng.uniform(0.95, 1.05))
    cost.refresh()
    for rows in (1, 9, 32, 64):
        assert cost.predict(rows, 50) == pytest.approx(0.01 + 0.0001 * rows, rel=0.05)
    predicted = [cost.predict(rows, 50) for rows in range(1, 200)]
    assert predicted == sorted(predicted)


def test_a_machine_that_slows_down_slows_all_row_counts() -> None:
    cost = StepCost()
    for _ in range(100):
        cost.observe(1, 10, 0.01)
        cost.observe(40, 10, 0.02)
    for _ in range(150):
        cost.observe(1, 10, 0.015)
    cost.refresh()
    assert cost.predict(40, 10) > 0.026  # though no such step was seen since


def test_long_contexts_are_told_from_many_rows() -> None:
    cost, rng = StepCost(), random.Random(2)
    context = 1000
    for _ in range(3000):
        context = context + 16 if context < 30_000 else 1000
        rows = rng.choice([16, 48])
        cost.observe(rows, context, 0.01 * (1 if rows == 16 else 1.5) + 5e-7 * context)
    cost.refresh()
    assert cost.slope == pytest.approx(5e-7, rel=0.3)


def test_one_first_call_is_set_aside() -> None:
    cost = StepCost()
    for _ in range(4):
        cost.observe(1, 0, 0.01)
    cost.refresh()
    assert not cost.observe(5, 0, 3.0)
    assert cost.observe(5, 0, 0.011)
    cost.refresh()
    assert cost.predict(5, 0) < 0.012


def test_draft_lengths_not_ordered_yet_are_interpolated() -> None:
    cost = DraftCost()
    assert cost.predict(1, 4) == 0.0
    cost.observe(1, 4, 0.004)
    assert cost.predict(1, 2) == pytest.approx(0.002)
    assert cost.predict(1, 8) == pytest.approx(0.008)
    cost.observe(1, 0, 0.001)
    assert cost.predict(1, 2) == pytest.approx(0.0025)
    assert cost.predict(64, 4) == pytest.approx(0.004)  # another size of batch: the nearest known one


def test_the_account_forgets_old_gains_and_earns_a_little() -> None:
    bank = Bank()
    bank.settle(10.0, 1.0)
    assert bank.balance_s == 0.25
    bank.settle(0.0, 0.3)
    assert bank.is_exhausted
    bank.earn(10.0)
    assert bank.balance_s == pytest.approx(0.0)


# -- the search ----------------------------------------------------------------------------------------------------------


def measured(per_row_s: float, *, per_draft_s: float = 0.0, num_requests: int = 1) -> tuple[StepCost, DraftCost]:
    steps, drafts = StepCost(), DraftCost()
    for rows in range(1, 40):
        for _ in range(5):
            steps.observe(rows, 0, 0.01 + per_row_s * rows)
    steps.refresh()
    for length in range(9):
        drafts.observe(num_requests, length, per_draft_s * length)
    return steps, drafts


@pytest.mark.parametrize("per_row_s", [0.0, 0.001, 0.004])
@pytest.mark.parametrize("per_draft_s", [0.0, 0.001])
def test_the_search_comes_within_a_percent_of_trying_everything(per_row_s: float, per_draft_s: float) -> None:
    steps, drafts = measured(per_row_s, per_draft_s=per_draft_s, num_requests=2)
    load = Load(2, 0.0, steps, drafts)
    curves = [[0.9**depth for depth in range(1, 6)], [0.4**depth for depth in range(1, 6)]]
    candidates = [Candidate(Outlook(curve, [1.0] * 5, curve), 5) for curve in curves]
    best = best_choice(load, candidates, 5)
    assert best is not None
    lengths = [drafts_at(candidate, price=best.price, longest=best.longest) for candidate in candidates]
    assert best.rate == pytest.approx(rate_of(load, candidates, lengths), rel=0.01)
    tried = [rate_of(load, candidates, pair) for pair in product(range(6), repeat=2) if any(pair)]
    assert best.rate >= 0.99 * max(tried)
    assert lengths[0] >= lengths[1]


def test_limits_are_kept_and_nobody_to_ask_is_no_choice() -> None:
    steps, drafts = measured(0.0)
    sure = Outlook([1.0] * 5, [1.0] * 5, [1.0] * 5)
    load = Load(1, 0.0, steps, drafts)
    best = best_choice(load, [Candidate(sure, 2)], 5)
    assert best is not None
    assert drafts_at(Candidate(sure, 2), price=best.price, longest=best.longest) == 2
    assert best_choice(load, [Candidate(sure, 0)], 5) is None


def test_rows_of_a_rare_lookup_come_in_the_steps_that_have_some() -> None:
    """With one request that finds 8 drafts in a step of ten, nine steps cost what plain ones do."""
    steps, drafts = measured(0.001)
    load = Load(1, 0.0, steps, drafts)
    rare = Candidate(Outlook([0.05] * 8, [0.1] * 8, [0.5] * 8), 8)
    seconds = 1.4 / rate_of(load, [rare], [8])
    assert seconds == pytest.approx(0.9 * steps.predict(1, 0) + 0.1 * steps.predict(9, 0), rel=0.01)
