"""EngineCore over the toy worker: what clients get equals the target's solo run, whatever is drafted, batched, cut or aborted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine.core import EngineCore
from specdec.engine.tokenizer import Tokenizer
from specdec.engine.types import EngineOutput, EngineRequest, SpecDecodeRequestStats
from specdec.errors import EngineDeadError, RequestRejected
from specdec.sampling_params import SamplingParams, SpeculationParams, StructuredOutputParams
from specdec.scheduler.output import TokenLogprobs
from tests.toy import Drafter, Target, ToyRunner, anti, coin, hash_target, oracle, ragged, scripted_target, toy_resolved

EOS = 96
DRAFTERS: dict[str, Drafter] = {"oracle": oracle(), "anti": anti(), "coin": coin(0.6), "ragged": ragged(coin(0.8))}


@dataclass
class Got:
    """A request's outputs, joined."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    stats: SpecDecodeRequestStats | None = None
    error: str | None = None
    num_outputs: int = 0
    num_cached_tokens: int = 0

    def add(self, output: EngineOutput) -> None:
        assert self.finish_reason is None, "nothing comes after the last output"
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_reason, self.error = output.finish_reason, output.stop_reason, output.error
        self.stats = output.stats
        self.num_outputs += 1
        self.num_cached_tokens += output.num_cached_tokens


def build(
    tokenizer: Tokenizer, *, drafter: Drafter | None = None, target: Target | None = None, **options: object
) -> tuple[EngineCore, ToyRunner]:
    resolved = toy_resolved(eos_token_ids=(EOS,), **options)  # type: ignore[arg-type]
    runner = ToyRunner.for_config(resolved, drafter=drafter, target=target or hash_target(eos_token_id=EOS))
    ticks = count()
    return EngineCore(resolved, runner, tokenizer=tokenizer, clock=lambda: next(ticks) * 0.001), runner


def request(request_id: str, prompt: Iterable[int] = (5, 6, 7), **sampling: object) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=SamplingParams(**sampling))  # type: ignore[arg-type]


def run(core: EngineCore, requests: Iterable[EngineRequest], *, max_steps: int = 2000) -> dict[str, Got]:
    got: dict[str, Got] = {}
    for entry in requests:
        got[entry.request_id] = Got()
        core.add_request(entry)
    for _ in range(max_steps):
        if not core.has_work:
            break
        for output in core.step():
            got[output.request_id].add(output)
    assert not core.has_work
    return got


def drain(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def assert_clean(core: EngineCore, runner: ToyRunner) -> None:
    """Nothing of any request is left anywhere."""
    assert runner.rows == {}
    assert core.describe_requests() == {}
    assert core.stats.gauges.num_running == core.stats.gauges.num_waiting == 0
    assert core.stats.gauges.kv_cache_usage == 0.0


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_mixed_batch_gives_each_request_its_solo_answer(toy: Tokenizer, drafter: str, async_scheduling: bool) -> None:
    core, runner = build(
        toy, drafter=DRAFTERS[drafter], num_drafts=4, async_scheduling=async_scheduling, num_blocks=24, max_num_batched_tokens=16
    )
    requests = [request(str(index), range(index, 2 * index + 3), max_tokens=10 + index, logprobs=1) for index in range(12)]
    got = run(core, requests)
    for entry in requests:
        token_ids, finish_reason, _ = runner.solo(entry.prompt_token_ids, entry.sampling)
        answer = got[entry.request_id]
        assert (answer.token_ids, answer.finish_reason) == (token_ids, finish_reason)
        assert answer.text == toy.decode(token_ids)
        assert [entry.token_id for entry in answer.logprobs] == token_ids
    assert_clean(core, runner)
    core.close()
    assert runner.is_closed


texts = st.text("ab !", min_size=1, max_size=20)


@settings(max_examples=120, deadline=None)
@given(
    texts,
    st.lists(st.text("ab !", min_size=1, max_size=3), max_size=2),
    st.sampled_from(sorted(DRAFTERS)),
    st.integers(1, 6),
    st.booleans(),
    st.booleans(),
    st.integers(0, 4),
)
def test_stop_strings_are_the_same_with_and_without_drafts(
    toy: Tokenizer, text: str, stops: list[str], drafter: str, num_drafts: int, include: bool, overlapped: bool, min_tokens: int
) -> None:
    sampling = {"stop": tuple(stops), "include_stop_str_in_output": include, "max_tokens": 24, "min_tokens": min_tokens, "logprobs": 0}
    target = scripted_target(toy.encode(text))
    plain, _ = build(toy, target=target)
    core, runner = build(toy, drafter=DRAFTERS[drafter], target=target, num_drafts=num_drafts, async_scheduling=overlapped)
    expected = run(plain, [request("r", **sampling)])["r"]
    answer = run(core, [request("r", **sampling)])["r"]
    for name in ("text", "token_ids", "logprobs", "finish_reason", "stop_reason"):
        assert getattr(answer, name) == getattr(expected, name), name
    assert len(answer.logprobs) == len(answer.token_ids)
    assert core.stats.num_generation_tokens == len(answer.token_ids)
    assert_clean(core, runner)
    told = [plan.finished["r"] for plan in runner.plans if "r" in plan.finished]
    assert [(entry.reason, entry.num_tokens) for entry in told] == [(answer.finish_reason, 3 + len(answer.token_ids))]
    core.close()


def test_one_request_that_fails_alone_does_not_touch_the_others(toy: Tokenizer) -> None:
    core, runner = build(toy, drafter=oracle(), num_drafts=2)
    runner.errors["bad"] = "no finite logit"
    got = run(core, [request("good", max_tokens=12), request("bad", max_tokens=12)])
    assert (got["bad"].finish_reason, got["bad"].error, got["bad"].token_ids) == ("error", "no finite logit", [])
    assert got["good"].token_ids == runner.solo((5, 6, 7), SamplingParams(max_tokens=12))[0]
    assert core.stats.num_requests_by_reason == {"stop": 0, "length": 1, "abort": 0, "error": 1}
    assert_clean(core, runner)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_step_that_raises_is_the_end(toy: Tokenizer, async_scheduling: bool) -> None:
    core, runner = build(toy, async_scheduling=async_scheduling)
    core.add_request(request("r", max_tokens=12))
    core.step()
    runner.raises = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        drain(core)
    with pytest.raises(EngineDeadError, match="out of memory"):
        core.step()


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_abort_returns_the_last_output_and_frees_everything(toy: Tokenizer, num_steps: int, async_scheduling: bool) -> None:
    core, runner = build(toy, drafter=oracle(), num_drafts=2, async_scheduling=async_scheduling)
    core.add_request(request("gone", max_tokens=40, ignore_eos=True))
    core.add_request(request("stays", (9,), max_tokens=8, ignore_eos=True))
    for _ in range(num_steps):
        core.step()
    last = core.abort("gone")
    assert last is not None
    assert (last.finish_reason, last.request_id) == ("abort", "gone")
    assert core.abort("gone") is None
    while core.has_work:
        assert all(output.request_id == "stays" for output in core.step())
    assert core.stats.num_requests_by_reason["abort"] == 1
    assert core.stats.num_requests_by_reason["length"] == 1
    assert_clean(core, runner)
    core.close()


def test_text_held_for_a_stop_string_is_not_lost_by_an_abort(toy: Tokenizer) -> None:
    core, _ = build(toy, target=scripted_target(toy.encode("aE")))
    core.add_request(request("r", stop=("END",), max_tokens=9))
    texts = [output.text for _ in range(2) for output in core.step()]
    last = core.abort("r")
    assert last is not None
    assert [*texts, last.text] == ["a", "", "E"]


def test_an_id_can_be_used_again_once_its_request_ended(toy: Tokenizer) -> None:
    core, runner = build(toy, drafter=coin(0.5), num_drafts=3)
    first = run(core, [request("same", max_tokens=9)])["same"]
    second = run(core, [request("same", max_tokens=9)])["same"]
    assert first.token_ids == second.token_ids
    core.add_request(request("same"))
    with pytest.raises(RequestRejected, match="'same' is in use"):
        core.add_request(request("same"))
    core.abort("same")
    assert_clean(core, runner)


def test_prompt_logprobs_cover_a_prompt_read_in_chunks(toy: Tokenizer) -> None:
    core, _ = build(toy, max_num_batched_tokens=4)
    prompt = tuple(range(11))
    got = run(core, [request("r", prompt, max_tokens=3, prompt_logprobs=1)])["r"]
    assert got.prompt_logprobs is not None
    assert [entry and entry.token_id for entry in got.prompt_logprobs] == [None, *prompt[1:]]
    assert got.num_outputs == 3  # chunks that sample nothing deliver nothing


def test_cached_prompt_tokens_are_reported_once(toy: Tokenizer) -> None:
    core, _ = build(toy)
    prompt = tuple(range(10))
    assert run(core, [request("a", prompt, max_tokens=4)])["a"].num_cached_tokens == 0
    assert run(core, [request("b", prompt, max_tokens=4)])["b"].num_cached_tokens == 8  # two full blocks of four
    assert (core.stats.num_prompt_tokens, core.stats.num_cached_prompt_tokens) == (20, 8)
    assert (core.stats.gauges.prefix_cache_queries, core.stats.gauges.prefix_cache_hits) == (20, 8)


def test_drafts_make_fewer_events_than_tokens_and_less_time_per_token(toy: Tokenizer) -> None:
    """Each step takes the same time here, so TPOT falls with accepted drafts while ITL, one sample per event, does not."""
    results = {}
    for name, options in {"plain": {}, "drafted": {"num_drafts": 4, "drafter": oracle()}}.items():
        core, _ = build(toy, target=hash_target(vocab_size=90), **options)
        got = run(core, [request("r", max_tokens=41)])["r"]
        assert len(got.token_ids) == 41
        results[name] = core.stats
    plain, drafted = results["plain"], results["drafted"]
    assert plain.inter_token_latency_s.count == 40
    assert drafted.inter_token_latency_s.count == 8  # 40 tokens in blocks of five
    assert drafted.time_per_output_token_s.mean == pytest.approx(plain.time_per_output_token_s.mean / 5)
    assert drafted.inter_token_latency_s.mean == pytest.approx(plain.inter_token_latency_s.mean)
    assert plain.spec.acceptance_length == 1.0
    assert (drafted.spec.acceptance_length, drafted.spec.acceptance_rate, drafted.spec.tokens_per_target_pass) == (5.0, 1.0, 5.0)
    assert drafted.spec.accepted_per_pos == [8, 8, 8, 8]


def test_counts_of_requests_add_up_to_those_of_the_engine(toy: Tokenizer) -> None:
    core, _ = build(toy, drafter=coin(0.5), num_drafts=4)
    got = run(core, [request(str(index), (index, 3), max_tokens=17) for index in range(6)])
    spec = core.stats.spec.total
    stats = [answer.stats for answer in got.values() if answer.stats is not None]
    assert len(stats) == 6
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_verified_tokens"):
        assert sum(getattr(entry, name) for entry in stats) == getattr(spec, name)
        assert getattr(spec, name) > 0
    assert sum(len(answer.token_ids) for answer in got.values()) == core.stats.num_generation_tokens
    assert core.stats.iteration_tokens.count == core.stats.num_steps == core.stats.step_duration_s["forward"].count


def test_a_request_may_opt_out_of_drafting(toy: Tokenizer) -> None:
    core, runner = build(toy, drafter=oracle(), num_drafts=4)
    wishes = {"all": SpeculationParams(), "two": SpeculationParams(num_speculative_tokens=2), "off": SpeculationParams(enabled=False)}
    got = run(core, [request(name, max_tokens=20, ignore_eos=True, speculation=wish) for name, wish in wishes.items()])
    longest = {name: max((plan.num_draft_nodes.get(name, 0) for plan in runner.plans), default=0) for name in wishes}
    assert longest == {"all": 4, "two": 2, "off": 0}
    assert got["all"].token_ids == got["two"].token_ids == got["off"].token_ids


@pytest.mark.parametrize(
    ("prompt", "sampling", "param", "text"),
    [
        ((), {}, "prompt", "is empty"),
        (range(64), {}, "prompt", "64 tokens, but the model takes at most 64"),
        ((1, 97), {}, "prompt", "token id 97, but ids are 0..96"),
        ((-1,), {}, "prompt", "token id -1"),
        ((1,), {"logit_bias": {500: 1.0}}, "logit_bias", "token id 500"),
        ((1,), {"stop_token_ids": (97,)}, "stop_token_ids", "token id 97"),
        ((1,), {"allowed_token_ids": ()}, "allowed_token_ids", "no token could be drawn"),
        ((1,), {"allowed_token_ids": (97,)}, "allowed_token_ids", "token id 97"),
        ((1,), {"n": 2}, "n", "one sample per request"),
        ((1,), {"min_tokens": 64}, "min_tokens", "only 63 tokens fit after a prompt of 1"),
        ((1,), {"structured": StructuredOutputParams(choice=("a",)), "ignore_eos": True}, "ignore_eos", "ends where its grammar does"),
        ((1,), {"structured": StructuredOutputParams(regex="(a")}, "structured", "parenthesis is not closed"),
        ((1,), {"structured": StructuredOutputParams(regex="a", choice=("a",))}, "structured", "exactly one constraint"),
    ],
)
def test_what_cannot_be_served_is_refused_at_admission(
    toy: Tokenizer, prompt: Iterable[int], sampling: dict[str, object], param: str, text: str
) -> None:
    core, _ = build(toy)
    with pytest.raises(RequestRejected, match=text) as caught:
        core.add_request(request("r", prompt, **sampling))
    assert caught.value.param == param
    assert not core.has_work


def test_bad_words_reach_the_worker_as_ids_with_and_without_a_leading_space(toy: Tokenizer) -> None:
    core, runner = build(toy)
    run(core, [request("r", max_tokens=1, bad_words=("ab",), bad_words_token_ids=((7,),))])
    sampling = runner.plans[0].new[0].sampling
    assert sampling.bad_words == ()
    assert sampling.bad_words_token_ids == ((7,), toy.encode("ab"), toy.encode(" ab"))


def test_the_watchdogs_report_names_state_and_progress(toy: Tokenizer) -> None:
    core, _ = build(toy, drafter=oracle(), num_drafts=3, max_num_seqs=1)
    core.add_request(request("runs", max_tokens=30, ignore_eos=True))
    core.add_request(request("waits", max_tokens=30))
    core.step()
    core.step()
    report = core.describe_requests()
    assert {name: entry["status"] for name, entry in report.items()} == {"runs": "running", "waits": "waiting"}
    assert report["runs"]["num_output_tokens"] == 5
    assert report["runs"]["num_draft_nodes"] == 3
    assert report["runs"]["last_token_age_s"] < report["runs"]["age_s"]
    assert report["waits"]["last_token_age_s"] is None
