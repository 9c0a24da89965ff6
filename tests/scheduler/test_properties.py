"""Whatever arrives, is accepted, aborted or preempted: plans are sound and tokens are those of the request alone.

ToyRunner and Drive assert the invariants (budgets, slots, counters, sharing) on every step; these tests vary the life.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.config.engine import ResolvedConfig
from specdec.errors import QueueFull, RequestRejected
from specdec.sampling_params import SamplingParams, SpeculationParams
from tests.scheduler.driving import Drive
from tests.toy import Drafter, anti, coin, hash_target, oracle, ragged, toy_resolved

EOS = 5
PROFILE = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Arrival:
    """A request of the test and the step it comes in. cut: end it as a stop string would after so many tokens (0: never)."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    step: int
    priority: int
    abort_step: int | None
    cut: int


@st.composite
def configs(draw: st.DrawFn) -> ResolvedConfig:
    """Small blocks, small pools, small budgets: everything that makes requests collide."""
    num_drafts = draw(st.integers(0, 5))
    lookahead = draw(st.integers(0, num_drafts + 1)) if num_drafts else 0
    prefill_lookahead = draw(st.sampled_from([0, 1, num_drafts])) if num_drafts else 0
    draft_slots = draw(st.sampled_from([0, 1, num_drafts])) if num_drafts else 0
    block_size, max_model_len = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([16, 24, 40]))
    return toy_resolved(
        num_drafts=num_drafts,
        draft_slots=draft_slots,
        lookahead=lookahead,
        prefill_lookahead=prefill_lookahead,
        block_size=block_size,
        num_blocks=max_model_len // block_size + draw(st.integers(-2, 6)),  # one long request fills it, or just does not fit
        enable_prefix_caching=draw(st.booleans()),
        max_model_len=max_model_len,
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=draw(st.integers(max(prefill_lookahead, 1) + draft_slots, 40)),
        long_prefill_token_threshold=draw(st.sampled_from([0, 3])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        async_scheduling=draw(st.booleans()),
        eos_token_ids=(EOS,),
    )


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    """A request; prompts repeat one another's beginnings, so that prefixes are shared."""
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 20)))
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(max_tokens or 4, 4))),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (11, 12, 13)])),
        prompt_logprobs=draw(st.sampled_from([None, None, 1])),
        speculation=SpeculationParams(
            enabled=draw(st.sampled_from([True, True, True, False])),
            num_speculative_tokens=draw(st.one_of(st.none(), st.integers(0, 3))),
        ),
    )
    length, kind = draw(st.integers(1, 18)), draw(st.integers(0, 2))
    return Arrival(
        prompt=tuple((i * i + (kind if i >= 6 else 0)) % 97 for i in range(length)),
        sampling=sampling,
        step=draw(st.integers(0, 12)),
        priority=draw(st.integers(0, 2)),
        abort_step=draw(st.one_of(st.none(), st.none(), st.integers(0, 20))),
        cut=draw(st.sampled_from([0, 0, 0, 1, 3])),
    )


drafters = st.one_of(
    st.sampled_from([oracle(), anti(), ragged(oracle())]),
    st.floats(0, 1).map(coin),
    st.floats(0, 1).map(lambda p: ragged(coin(p))),
)


def live(drive: Drive, life: list[Arrival], *, depth: int) -> dict[str, Arrival]:
    """Run a whole life; returns the requests that were neither refused, aborted nor cut."""
    whole: dict[str, Arrival] = {}
    for number in range(400):
        for index, arrival in enumerate(life):
            if arrival.step == number:
                try:
                    drive.add(str(index), arrival.prompt, arrival.sampling, priority=arrival.priority)
                    whole[str(index)] = arrival
                except RequestRejected:
                    continue
            if arrival.abort_step == number and drive.scheduler.abort(str(index)):
                del whole[str(index)]
        is_idle = not (drive.scheduler.has_work or drive.scheduler.has_unsent_finishes or drive.in_flight)
        if is_idle and number > 12:
            return whole
        plan = drive.schedule()
        while drive.in_flight and (len(drive.in_flight) >= depth or not plan.num_scheduled_tokens):
            for request_id, commit in drive.update().items():
                cut = life[int(request_id)].cut
                if cut and commit.token_ids and len(drive.outputs[request_id]) >= cut:
                    num_prompt = len(life[int(request_id)].prompt)
                    drive.scheduler.finish(request_id, "stop", num_tokens=num_prompt + cut)
                    del drive.outputs[request_id][cut:]
                    whole.pop(request_id, None)
                    drive.check()
    raise AssertionError(f"no end: {drive.scheduler.requests}")


@PROFILE
@given(configs(), st.lists(arrivals(), min_size=1, max_size=7), drafters, st.integers(1, 3))
def test_every_request_gets_the_tokens_it_would_get_alone(
    resolved: ResolvedConfig, life: list[Arrival], drafter: Drafter, depth: int
) -> None:
    target = hash_target(eos_token_id=EOS, eos_rate=0.04)
    drive = Drive(resolved, drafter=drafter, target=target)
    whole = live(drive, life, depth=depth if resolved.engine.scheduler.async_scheduling else 1)
    for request_id, output in drive.outputs.items():
        arrival = life[int(request_id)]
        expected, reason, stop_reason = drive.runner.solo(arrival.prompt, arrival.sampling)
        if request_id in whole:
            assert output == expected
            assert (drive.ends[request_id].finish_reason, drive.ends[request_id].stop_reason) == (reason, stop_reason)
        else:
            assert output == expected[: len(output)]
        for commit in drive.commits[request_id]:
            assert 0 <= commit.num_accepted <= commit.num_verified <= commit.num_drafts
    drive.check_clean()


@PROFILE
@given(configs(), st.lists(arrivals(), min_size=2, max_size=5))
def test_prompt_log_probabilities_cover_each_prompt_once_wherever_chunks_end(resolved: ResolvedConfig, life: list[Arrival]) -> None:
    drive = Drive(resolved, drafter=oracle())
    entries: dict[str, dict[int, object]] = {}
    for index, arrival in enumerate(life):
        try:
            drive.add(str(index), arrival.prompt, SamplingParams(max_tokens=4, prompt_logprobs=0))
        except RequestRejected:
            continue
    while drive.scheduler.has_work:
        _, output = drive.schedule(), drive.in_flight[-1][1]
        for request_id, commit in drive.update().items():
            rows = output.results[request_id].prompt_logprobs or ()
            entries.setdefault(request_id, {}).update({commit.start + i: row for i, row in enumerate(rows)})
    for request_id in drive.outputs:
        prompt = life[int(request_id)].prompt
        assert [entries[request_id][i] and entries[request_id][i].token_id for i in range(len(prompt))] == [None, *prompt[1:]]  # type: ignore[attr-defined]


@PROFILE
@given(st.data())
def test_a_full_queue_refuses_and_loses_nobody(data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, 3))
    drive = Drive(toy_resolved(num_drafts=2, max_waiting=limit, max_num_seqs=2), drafter=oracle())
    for index in range(12):
        room = drive.scheduler.num_waiting < limit
        if room:
            drive.add(str(index), [index, 1, 2])
        else:
            with pytest.raises(QueueFull, match=f"{limit} requests are waiting, and max_waiting is {limit}"):
                drive.add(str(index), [index, 1, 2])
        if data.draw(st.booleans()):
            drive.step()
    drive.run()
    for request_id, output in drive.outputs.items():
        assert output == drive.runner.solo([int(request_id), 1, 2], SamplingParams(max_tokens=8))[0]
    drive.check_clean()
