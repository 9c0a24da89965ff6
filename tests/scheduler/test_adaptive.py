"""The adaptive policy on a simulated clock: it finds the best lengths, harms nobody, rests when nothing changes."""

from __future__ import annotations

import time

import pytest

from specdec.sampling_params import SamplingParams, SpeculationParams
from specdec.scheduler.adaptive import CAP_STEPS, FLOOR_STEPS, AdaptivePolicy
from specdec.scheduler.output import DraftOrder, StepTimings
from specdec.scheduler.request import CommitResult, Request
from tests.scheduler.driving import Drive
from tests.scheduler.simulated import Curve, World
from tests.toy import coin, toy_resolved

LOOKUP, CHAIN = Curve(), Curve(per_draft=0.07)
CURVES = pytest.mark.parametrize("curve", [LOOKUP, CHAIN], ids=["lookup", "chain"])
MAX_NODES = 8


def policy() -> AdaptivePolicy:
    return AdaptivePolicy(MAX_NODES, source="ngram")


def request_of(name: str = "r", sampling: SamplingParams | None = None) -> Request:
    return Request(request_id=name, prompt_token_ids=(1,) * 4, sampling=sampling or SamplingParams(), max_model_len=10**6)


# -- no harm -------------------------------------------------------------------------------------------------------------


@CURVES
@pytest.mark.parametrize("num_requests", [1, 8, 32])
def test_drafts_that_are_never_kept_cost_less_than_one_percent(curve: Curve, num_requests: int) -> None:
    run = World(lambda step, request: 0.0, curve, noise=0.03).run(policy(), num_requests=num_requests, num_steps=2000)
    assert run.rate() >= 0.99 * run.plain_rate


@CURVES
@pytest.mark.parametrize("num_requests", [1, 8, 32])
def test_an_adversary_cannot_overdraw_the_account(curve: Curve, num_requests: int) -> None:
    chosen = policy()
    run = World(lambda step, request: float(step // 50 % 2), curve, noise=0.03).run(chosen, num_requests=num_requests, num_steps=2000)
    assert run.rate() >= 0.98 * run.plain_rate
    most_lost = curve.step_s(num_requests * (1 + MAX_NODES)) + curve.draft_s(MAX_NODES) - curve.step_s(num_requests)
    assert (
        run.least_bank_s >= -1.05 * max(0.02, FLOOR_STEPS * run.plain_step_s) - 2 * most_lost
    )  # the drafts that were ordered before it was known are still tested
    assert run.most_bank_s <= 1.05 * max(0.25, CAP_STEPS * run.plain_step_s)  # by its own measurement of a plain step


@pytest.mark.parametrize("num_requests", [1, 8, 32])
def test_an_adversary_who_knows_the_policy_is_stopped_by_the_account(num_requests: int) -> None:
    """Drafts are kept in probes and never afterwards, so the estimates promise a gain each time that there is none."""
    chosen = policy()
    world = World(lambda step, request: 0.0 if chosen.is_drafting else 1.0, CHAIN)
    run = world.run(chosen, num_requests=num_requests, num_steps=2000)
    assert run.rate() >= 0.98 * run.plain_rate
    most_lost = CHAIN.step_s(num_requests * (1 + MAX_NODES)) + CHAIN.draft_s(MAX_NODES) - run.plain_step_s
    assert run.least_bank_s >= -1.05 * max(0.02, FLOOR_STEPS * run.plain_step_s) - 2 * most_lost


def test_a_lookup_that_starts_to_match_is_noticed() -> None:
    world = World(lambda step, request: 0.9 if step >= 1000 else 0.0, CHAIN, existence=0.5, noise=0.03)
    run = world.run(policy(), num_requests=4, num_steps=2000)
    assert sum(run.lengths[900:1000]) < 0.2 * 100 * 4
    assert sum(run.lengths[-300:]) > 2.0 * 300 * 4


def test_drafts_that_stop_being_kept_stop_within_a_few_steps() -> None:
    chosen = policy()
    run = World(lambda step, request: 0.8 if step < 1000 else 0.0, CHAIN).run(chosen, num_requests=1, num_steps=1100)
    assert sum(run.lengths[900:1000]) > 3 * 100
    assert sum(run.lengths[1000:]) < 400
    assert run.least_bank_s > -chosen.bank.floor_s, "it saw that nothing was kept; it was not stopped by the account"


def test_depths_that_were_never_tried_are_explored() -> None:
    """The first draft is a gamble and all after it are sure, as with copied text: one draft hardly pays, eight do."""
    run = World(lambda step, request: 0.35, Curve(per_draft=0.2), later=0.97).run(policy(), num_requests=1, num_steps=1500)
    assert sum(run.lengths[-200:]) > 5 * 200


def test_a_slow_first_call_is_no_verdict() -> None:
    """The first steps with drafts compile something and take a second; that must not end drafting for good."""
    world = World(lambda step, request: 0.9, LOOKUP)

    seen: set[int] = set()

    class FirstCalls(AdaptivePolicy):
        def observe(self, results, *, num_rows, timings):  # type: ignore[no-untyped-def]
            if num_rows not in seen and len(seen) >= 1:
                timings = StepTimings(forward_s=1.0)
            seen.add(num_rows)
            super().observe(results, num_rows=num_rows, timings=timings)

    run = world.run(FirstCalls(MAX_NODES, source="ngram"), num_requests=1, num_steps=300)
    assert sum(run.lengths[-100:]) >= 7 * 100


# -- the best length -----------------------------------------------------------------------------------------------------


@CURVES
@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("num_requests", "num_steps"), [(1, 1200), (4, 1200), (16, 800), (64, 400), (256, 250)])
def test_lengths_are_within_three_percent_of_the_best_fixed_one(curve: Curve, acceptance: float, num_requests: int, num_steps: int) -> None:
    world = World(lambda step, request: acceptance, curve, noise=0.03)
    run = world.run(policy(), num_requests=num_requests, num_steps=num_steps)
    best = world.best_fixed_rate(num_requests=num_requests, max_nodes=MAX_NODES, acceptance=acceptance)
    assert run.expected_rate(skip=100) >= 0.97 * best
    if num_requests <= 4 and acceptance >= 0.5:
        assert best > 1.4 * run.plain_rate, "this load must be one where drafting pays"


def test_rows_that_stay_free_are_found_out() -> None:
    """On a machine where 512 rows cost what 64 do, the prior is wrong by a factor, and drafting pays at any load."""
    world = World(lambda step, request: 0.7, Curve(flat=10_000), noise=0.02)
    run = world.run(policy(), num_requests=64, num_steps=300)
    assert run.expected_rate(skip=100) >= 0.95 * world.best_fixed_rate(num_requests=64, max_nodes=MAX_NODES, acceptance=0.7)


def test_good_and_bad_requests_get_their_own_lengths() -> None:
    chosen = policy()
    world = World(lambda step, request: 0.95 if request < 4 else 0.0, Curve(flat=4, per_row=0.05))
    world.run(chosen, num_requests=8, num_steps=600)
    lengths = [found.length for found in chosen._tracked.values()]
    assert min(lengths[:4]) >= 3
    assert max(lengths[4:]) <= 1


@pytest.mark.parametrize("num_requests", [1, 8])
@CURVES
def test_a_stationary_source_keeps_its_length(curve: Curve, num_requests: int) -> None:
    chosen = policy()
    world = World(lambda step, request: 0.6, curve, noise=0.05)
    world.run(chosen, num_requests=num_requests, num_steps=400)
    before = chosen.num_switches
    world = World(lambda step, request: 0.6, curve, noise=0.05, seed=2)
    world.run(chosen, num_requests=num_requests, num_steps=3000)
    assert chosen.num_switches - before < 3


# -- requests ------------------------------------------------------------------------------------------------------------


def order_after(sampling: SamplingParams, *, num_steps: int = 60) -> DraftOrder:
    chosen = policy()
    request = request_of("r", sampling)
    waiting = 0
    for _ in range(num_steps):
        order = chosen.orders([request], batch_size=1)["r"]
        commit = CommitResult(token_ids=(7,) * (waiting + 1), num_drafts=waiting, num_accepted=waiting, num_verified=waiting)
        chosen.observe({"r": commit}, num_rows=1 + waiting, timings=StepTimings(forward_s=0.01))
        waiting = order.max_nodes
    return order


def wish(**fields: object) -> SamplingParams:
    return SamplingParams(speculation=SpeculationParams(**fields))  # type: ignore[arg-type]


def test_a_request_decides_within_what_the_server_offers() -> None:
    assert order_after(SamplingParams()) == DraftOrder(MAX_NODES)
    assert order_after(wish(num_speculative_tokens=2)) == DraftOrder(2)
    assert order_after(wish(method="suffix")) == DraftOrder(MAX_NODES, "suffix")
    assert order_after(wish(enabled=False)) == DraftOrder(0)


def test_nothing_is_ordered_past_the_end_of_a_request() -> None:
    chosen, request = policy(), request_of("r", SamplingParams(max_tokens=9))
    lengths = []
    for num_tokens in range(9):
        request.output_token_ids = [7] * num_tokens
        lengths.append(chosen.orders([request], batch_size=1)["r"].max_nodes)
    assert all(length <= 8 - num_tokens for num_tokens, length in enumerate(lengths))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_outputs_equal_plain_decoding_and_nothing_is_kept_of_ended_requests(async_scheduling: bool) -> None:
    chosen = AdaptivePolicy(4, source="ngram")
    resolved = toy_resolved(num_drafts=4, async_scheduling=async_scheduling, num_blocks=24, max_num_batched_tokens=24)
    drive = Drive(resolved, drafter=coin(0.7), policy=chosen)
    drive.runner.timings = StepTimings(forward_s=0.01)
    prompts = {f"r{i}": [i + 1, 2, 3] for i in range(6)}
    for name, prompt in prompts.items():
        drive.add(name, prompt, SamplingParams(max_tokens=40))
    drive.run(depth=2 if async_scheduling else 1)
    assert drive.outputs == {name: drive.runner.solo(prompt, SamplingParams(max_tokens=40))[0] for name, prompt in prompts.items()}
    assert sum(commit.num_drafts for commits in drive.commits.values() for commit in commits) > 20
    assert not chosen._tracked
    drive.check_clean()


def test_requests_that_vanish_are_dropped_too() -> None:
    chosen, living = policy(), request_of("living")
    chosen.orders([living, request_of("aborted")], batch_size=2)
    for _ in range(400):
        chosen.orders([living], batch_size=1)
        chosen.observe({"living": CommitResult(token_ids=(7,))}, num_rows=1, timings=StepTimings(forward_s=0.01))
    assert set(chosen._tracked) == {"living"}


def test_nobody_who_may_draft_is_no_fault() -> None:
    run = World(lambda step, request: 0.5, LOOKUP).run(policy(), num_requests=3, num_steps=100, sampling=wish(enabled=False))
    assert sum(run.lengths) == 0
    assert run.rate() == pytest.approx(run.plain_rate)


def test_a_step_of_eight_requests_is_decided_in_little_time() -> None:
    """The bound is several times what it takes, because machines differ; what it must catch is work that grows with every step."""
    chosen = policy()
    requests = [request_of(f"r{i}") for i in range(8)]
    commits = {f"r{i}": CommitResult(token_ids=(7, 7), num_drafts=4, num_accepted=1, num_verified=1, source="ngram") for i in range(8)}
    chunks = []
    for _ in range(10):
        start_s = time.thread_time()
        for _ in range(64):
            chosen.orders(requests, batch_size=8)
            chosen.observe(commits, num_rows=40, timings=StepTimings(forward_s=0.02))
        chunks.append((time.thread_time() - start_s) / 64)
    assert min(chunks) < 150e-6


def test_drafts_that_the_drafter_could_not_make_are_no_rejections() -> None:
    """A lookup that finds something in one step of ten, and then is always right, keeps its length."""
    chosen = policy()
    World(lambda step, request: 1.0, LOOKUP, existence=0.1).run(chosen, num_requests=2, num_steps=400)
    assert chosen.state().draft_length >= 6


def test_the_engine_builds_it_when_nothing_was_asked() -> None:
    from dataclasses import replace

    from specdec.config.engine import EngineConfig
    from specdec.config.speculative import default_speculative
    from specdec.scheduler.policy import build_policy

    built = build_policy(replace(toy_resolved(num_drafts=4), engine=EngineConfig(speculative=default_speculative())))
    assert isinstance(built, AdaptivePolicy)
    assert built.max_nodes == 4
