"""Draft lengths through the whole engine on a simulated clock: a table by batch size, one that adapts, and requests that want less."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from specdec.config.engine import ResolvedConfig
from specdec.config.speculative import NgramConfig
from specdec.engine.core import EngineCore
from specdec.engine.types import EngineRequest
from specdec.metrics.stats import COLLAPSE_STEPS
from specdec.sampling_params import SamplingParams, SpeculationParams
from specdec.scheduler.output import ModelRunnerOutput, SchedulerOutput, StepTimings
from tests.engine.tokenizers_for_tests import toy_tokenizer
from tests.scheduler.simulated import Curve
from tests.toy import Drafter, ToyRunner, anti, coin, oracle, toy_resolved

CURVE = Curve(base_s=0.01)
TABLE = NgramConfig(num_speculative_tokens=2, num_speculative_tokens_per_batch_size=((1, 4, 2), (5, 512, 0)))
ADAPTIVE = NgramConfig(num_speculative_tokens=4, policy="adaptive")


class TimedRunner:
    """A toy runner whose steps take what the curve says; steps that only decode are kept as (requests, drafts, seconds)."""

    def __init__(self, resolved: ResolvedConfig, drafter: Drafter) -> None:
        self.toy = ToyRunner.for_config(resolved, drafter=drafter)
        self.num_blocks = self.toy.num_blocks
        self.now_s = 0.0
        self.decoding: list[tuple[int, int, float]] = []

    def execute(self, plan: SchedulerOutput, /) -> ModelRunnerOutput:
        rows = plan.total_num_scheduled_tokens
        seconds = CURVE.step_s(rows)
        self.now_s += seconds
        num_drafts = sum(plan.num_draft_nodes.values())
        if rows and not plan.new and rows == len(plan.num_scheduled_tokens) + num_drafts:
            self.decoding.append((len(plan.num_scheduled_tokens), num_drafts, seconds))
        return replace(self.toy.execute(plan), timings=StepTimings(forward_s=seconds))

    def close(self) -> None:
        self.toy.close()


def build(config: NgramConfig, drafter: Drafter) -> tuple[EngineCore, TimedRunner]:
    resolved = toy_resolved(
        num_drafts=config.num_speculative_tokens or 0, max_model_len=600, num_blocks=2048, max_num_seqs=16, max_num_batched_tokens=256
    )
    resolved = replace(resolved, engine=replace(resolved.engine, speculative=config))
    runner = TimedRunner(resolved, drafter)
    return EngineCore(resolved, runner, tokenizer=toy_tokenizer(), clock=lambda: runner.now_s), runner


def request(name: str, num_tokens: int, **speculation: object) -> EngineRequest:
    wish = SpeculationParams(**speculation)  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, speculation=wish)
    return EngineRequest(request_id=name, prompt_token_ids=(ord(name[-1]) % 90, 2, 3), sampling=sampling)


def run(core: EngineCore, got: dict[str, list[int]], *, num_steps: int = 10**6) -> None:
    while core.has_work and num_steps:
        for output in core.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
        num_steps -= 1


@pytest.mark.parametrize("config", [TABLE, ADAPTIVE], ids=["table", "adaptive"])
def test_load_goes_from_1_to_16_and_back_without_a_cliff(config: NgramConfig) -> None:
    core, runner = build(config, coin(0.8))
    got: dict[str, list[int]] = {}
    asked = [request("long", 500)]
    core.add_request(asked[0])
    run(core, got, num_steps=60)
    crowd = [request(f"r{i}", 60) for i in range(15)]
    for other in crowd:
        core.add_request(other)
    run(core, got)
    steps = runner.decoding
    assert {1, 16} <= {num for num, _, _ in steps}
    seconds = [taken for _, _, taken in steps]
    assert max(seconds) <= 3 * median(seconds)
    for one in [*asked, *crowd]:
        assert got[one.request_id] == runner.toy.solo(one.prompt_token_ids, one.sampling)[0]
    last = [drafts for num, drafts, _ in steps[-20:] if num == 1]
    assert len(last) == 20
    assert sum(last) >= 20, "drafting resumes when the crowd is gone"


def test_the_table_is_followed_at_each_size() -> None:
    core, runner = build(TABLE, oracle())
    for i in range(8):
        core.add_request(request(f"r{i}", 30 + 10 * i))
    run(core, {})
    # the drafts of a step were ordered in the step before, so sizes are compared where they did not change
    pairs = zip(runner.decoding, runner.decoding[1:], strict=False)
    by_size: dict[int, set[float]] = {}
    for (before, _, _), (num, drafts, _) in pairs:
        if before == num:
            by_size.setdefault(num, set()).add(drafts / num)
    assert by_size[8] == by_size[5] == {0.0}
    assert max(by_size[4]) == max(by_size[1]) == 2.0


@pytest.mark.parametrize("config", [NgramConfig(num_speculative_tokens=4), ADAPTIVE], ids=["fixed", "adaptive"])
def test_a_request_without_drafts_takes_one_row_beside_others_that_have_them(config: NgramConfig) -> None:
    core, _ = build(config, oracle())
    core.add_request(request("a", 60))
    core.add_request(request("off", 60, enabled=False))
    core.add_request(request("two", 60, num_speculative_tokens=2))
    ends = {}
    while core.has_work:
        for output in core.step():
            if output.finish_reason is not None:
                ends[output.request_id] = output.stats
    assert ends["off"].num_draft_tokens == 0
    assert ends["off"].num_steps == 60
    assert 0 < ends["two"].num_draft_tokens / ends["two"].num_drafts <= 2
    assert ends["a"].num_draft_tokens / ends["a"].num_drafts > 2


def test_the_state_of_the_policy_is_in_the_gauges() -> None:
    core, _ = build(ADAPTIVE, oracle())
    core.add_request(request("a", 100))
    run(core, {}, num_steps=12)
    assert core.stats.gauges.draft_length == 4.0
    assert core.stats.gauges.draft_bank_s > 0
    core.abort("a")
    core, _ = build(TABLE, oracle())
    core.add_request(request("a", 100))
    run(core, {}, num_steps=12)
    assert core.stats.gauges.draft_length == 2


def test_dead_drafting_is_warned_of_once_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    core, _ = build(NgramConfig(num_speculative_tokens=2), anti())
    core.add_request(request("a", 500))
    run(core, {}, num_steps=COLLAPSE_STEPS)
    assert not core.stats.collapse.is_collapsed
    run(core, {}, num_steps=2)
    assert core.stats.snapshot().collapse.is_collapsed
    run(core, {})
    core.add_request(request("b", 500))
    run(core, {})
    assert [record.levelname for record in caplog.records if "no draft was accepted" in record.message] == ["WARNING"]


def test_one_kept_draft_revives_it() -> None:
    right, wrong = oracle(), anti()
    core, runner = build(NgramConfig(num_speculative_tokens=2), lambda history, count, target: wrong(history, count, target))
    core.add_request(request("a", 500))
    run(core, {}, num_steps=COLLAPSE_STEPS + 5)
    assert core.stats.collapse.is_collapsed
    runner.toy.drafter = right
    run(core, {}, num_steps=3)
    assert not core.stats.collapse.is_collapsed
