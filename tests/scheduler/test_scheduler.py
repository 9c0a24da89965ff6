"""Golden steps: who is scheduled with how many rows, what is reserved, who is preempted, what the worker is told."""

from __future__ import annotations

import pytest

from specdec.errors import ConfigError, QueueFull, RequestRejected
from specdec.sampling_params import SamplingParams, SpeculationParams, StructuredOutputParams
from specdec.scheduler.output import DraftOrder, FinishedRequest
from specdec.scheduler.policy import FixedPolicy
from specdec.scheduler.request import Request
from specdec.scheduler.scheduler import Scheduler
from tests.scheduler.driving import Drive
from tests.toy import Drafter, anti, coin, oracle, ragged, script, scripted_target, toy_resolved

LONG = SamplingParams(max_tokens=30)


def counts(request: Request) -> tuple[int, int, int, int]:
    return request.num_tokens, request.num_computed_tokens, request.num_draft_nodes, request.num_output_placeholders


# -- one decode step -----------------------------------------------------------------------------------------------------


def test_one_decode_step_with_one_of_three_drafts_kept() -> None:
    drive = Drive(toy_resolved(num_drafts=3, lookahead=3), drafter=script([21, 90, 90]), target=scripted_target(range(20, 40)))
    request = drive.add("a", range(9), LONG)
    drive.step()
    assert counts(request) == (10, 9, 3, 0)
    plan = drive.schedule()
    assert (plan.num_scheduled_tokens, plan.num_draft_nodes) == ({"a": 4}, {"a": 3})
    assert plan.cached[0].num_computed_tokens == 9
    assert counts(request) == (10, 13, 0, 4)
    assert len(request.block_ids) * 4 == 16  # positions 9 to 12, and three more for the drafter
    commit = drive.update()["a"]
    assert (commit.token_ids, commit.num_drafts, commit.num_accepted) == ((21, 22), 3, 1)
    assert counts(request) == (12, 11, 3, 0)


def test_one_decode_step_planned_before_the_last_is_known() -> None:
    resolved = toy_resolved(num_drafts=3, async_scheduling=True)
    drive = Drive(resolved, drafter=script([21, 22, 90]), target=scripted_target(range(20, 40)))
    request = drive.add("a", range(9), LONG)
    drive.schedule()
    assert counts(request) == (9, 9, 3, 1)  # the drafts it will propose wait already
    plan = drive.schedule()
    assert (plan.num_scheduled_tokens, plan.num_draft_nodes) == ({"a": 4}, {"a": 3})
    assert counts(request) == (9, 13, 3, 5)
    drive.update()
    assert counts(request) == (10, 13, 3, 4)
    commit = drive.update()["a"]
    assert (commit.token_ids, commit.num_accepted) == ((21, 22, 23), 2)
    assert counts(request) == (13, 12, 3, 0)


def test_without_drafts_waiting_there_is_no_draft_row() -> None:
    drive = Drive(toy_resolved(num_drafts=3), drafter=script([]))
    drive.add("a", [1, 2], LONG)
    drive.step()
    for _ in range(3):
        plan, _ = drive.step()
        assert (plan.num_scheduled_tokens, plan.num_draft_nodes, plan.drafts_next) == ({"a": 1}, {}, {"a": DraftOrder(3)})


def test_rejected_drafts_release_no_blocks() -> None:
    drive = Drive(toy_resolved(num_drafts=3), drafter=anti())
    request = drive.add("a", range(6), LONG)
    drive.step()
    plan, _ = drive.step()  # positions 6 to 9 need a third block, and only position 6 is kept
    assert plan.cached[0].new_block_ids == (3,)
    assert (request.num_computed_tokens, request.block_ids) == (7, [1, 2, 3])
    assert drive.step()[0].cached[0].new_block_ids == ()


def test_plain_decoding_orders_no_drafts() -> None:
    drive = Drive(toy_resolved())
    drive.add("a", [1, 2], LONG)
    assert [drive.step()[0].drafts_next for _ in range(3)] == [{}, {}, {}]


# -- budgets and chunks --------------------------------------------------------------------------------------------------


def test_a_prompt_is_read_in_chunks_and_only_its_last_samples() -> None:
    drive = Drive(toy_resolved(num_drafts=2, max_num_batched_tokens=4), drafter=oracle())
    drive.add("a", range(10), LONG)
    plans = [drive.step()[0] for _ in range(4)]
    assert [plan.num_scheduled_tokens["a"] for plan in plans] == [4, 4, 2, 3]
    assert [plan.drafts_next for plan in plans] == [{}, {}, {"a": DraftOrder(2)}, {"a": DraftOrder(2)}]
    assert [plan.num_draft_nodes for plan in plans] == [{}, {}, {}, {"a": 2}]


def test_decoding_goes_before_prompts_and_prompts_fill_what_is_left() -> None:
    drive = Drive(toy_resolved(num_drafts=3, max_num_batched_tokens=10), drafter=oracle())
    drive.add("a", [1, 2], LONG)
    drive.step()
    drive.add("b", range(20), LONG)
    plan, _ = drive.step()
    assert plan.num_scheduled_tokens == {"a": 4, "b": 6}
    assert [new.request_id for new in plan.new] == ["b"]


def test_drafts_give_way_before_anybodys_next_token() -> None:
    drive = Drive(toy_resolved(num_drafts=5, max_num_batched_tokens=8), drafter=oracle())
    for name in "abc":
        drive.add(name, [1, ord(name)], LONG)
    drive.step()
    plan, _ = drive.step()
    assert plan.num_scheduled_tokens == {"a": 6, "b": 1, "c": 1}
    assert plan.num_draft_nodes == {"a": 5}


def test_draft_slots_cost_input_budget_but_no_rows() -> None:
    drive = Drive(toy_resolved(num_drafts=2, draft_slots=2, max_num_batched_tokens=10), drafter=oracle())
    drive.add("a", range(5), LONG)
    drive.add("b", range(10, 15), LONG)
    assert drive.step()[0].num_scheduled_tokens == {"a": 5, "b": 1}  # 5 + 2, then 1 + 2
    assert drive.step()[0].num_scheduled_tokens == {"a": 3, "b": 3}  # b's prompt gets what is left: 10 - 5 - 2
    assert drive.step()[0].num_scheduled_tokens == {"a": 3, "b": 1}


def test_a_chunk_leaves_no_fewer_tokens_than_the_drafter_reads_ahead() -> None:
    drive = Drive(toy_resolved(num_drafts=3, prefill_lookahead=3, max_num_batched_tokens=8), drafter=oracle())
    drive.add("a", range(10), LONG)
    assert [drive.step()[0].num_scheduled_tokens["a"] for _ in range(2)] == [7, 3]


def test_long_prompts_are_held_back_only_when_others_are_there() -> None:
    drive = Drive(toy_resolved(long_prefill_token_threshold=6))
    drive.add("a", range(20), LONG)
    assert drive.step()[0].num_scheduled_tokens == {"a": 20}
    drive.add("b", range(30, 50), LONG)
    drive.add("c", [1, 2], LONG)
    assert drive.step()[0].num_scheduled_tokens == {"a": 1, "b": 6, "c": 2}


def test_no_more_requests_run_than_allowed() -> None:
    drive = Drive(toy_resolved(max_num_seqs=2))
    for name in "abc":
        drive.add(name, [1, 2], SamplingParams(max_tokens=2))
    assert list(drive.step()[0].num_scheduled_tokens) == ["a", "b"]
    assert (drive.scheduler.num_running, drive.scheduler.num_waiting) == (2, 1)
    drive.step()
    assert list(drive.step()[0].num_scheduled_tokens) == ["c"]


# -- memory --------------------------------------------------------------------------------------------------------------


def test_room_to_draft_then_drafts_then_the_newest_request_give_way() -> None:
    drive = Drive(toy_resolved(num_drafts=3, lookahead=3, num_blocks=7, max_model_len=25), drafter=oracle())
    for name, length in (("a", 7), ("b", 5)):
        drive.add(name, range(ord(name), ord(name) + length), SamplingParams(max_tokens=16))
    plans, epochs = [], []
    while "b" not in (plans[-1].preempted_ids if plans else ()):
        epochs.append(drive.scheduler.requests["b"].epoch)
        plans.append(drive.step()[0])
    assert drive.scheduler.num_preemptions == 1
    starved = [plan for plan in plans if plan.drafts_next.get("b") == DraftOrder(0)]
    assert starved, "b lost its room to draft before it was preempted"
    assert list(plans[-1].num_scheduled_tokens) == ["a"]
    assert drive.scheduler.requests["b"].epoch > epochs[-1]
    kept = list(drive.outputs["b"])
    while not plans[-1].new:
        plans.append(drive.step()[0])
    resumed = plans[-1].new[0]
    assert (resumed.request_id, resumed.num_prompt_tokens) == ("b", 5)
    assert list(resumed.token_ids[5:]) == kept
    drive.run()
    assert {name: drive.outputs[name] for name in "ab"} == {
        name: drive.runner.solo(range(ord(name), ord(name) + length), SamplingParams(max_tokens=16))[0]
        for name, length in (("a", 7), ("b", 5))
    }
    drive.check_clean()


def test_waiting_drafts_are_dropped_rather_than_a_request() -> None:
    drive = Drive(toy_resolved(num_drafts=3, num_blocks=4, max_model_len=13), drafter=oracle())
    drive.add("a", range(3), SamplingParams(max_tokens=5))
    drive.add("b", range(20, 23), SamplingParams(max_tokens=5))
    drive.step()
    plan, _ = drive.step()  # a takes the last block for its drafts; b has one slot, for its newest token
    assert (plan.num_scheduled_tokens, plan.num_draft_nodes) == ({"a": 4, "b": 1}, {"a": 3})
    drive.run()
    assert drive.scheduler.num_preemptions == 0
    drive.check_clean()


def test_a_preempted_request_comes_back_before_younger_ones() -> None:
    drive = Drive(toy_resolved(num_blocks=9, max_model_len=25))
    for name in "abc":
        drive.add(name, range(ord(name), ord(name) + 5), SamplingParams(max_tokens=19))
    while not drive.scheduler.num_preemptions:
        drive.step()
    drive.add("d", [1], SamplingParams(max_tokens=2))
    assert [request.request_id for request in drive.scheduler.waiting] == ["c", "d"]
    drive.run()
    drive.check_clean()


def test_the_least_urgent_request_is_preempted_and_the_most_urgent_served_first() -> None:
    drive = Drive(toy_resolved(num_blocks=9, max_model_len=25, policy="priority", max_num_seqs=3))
    for name, priority in (("a", 5), ("b", 1), ("c", 3), ("d", 0)):
        drive.add(name, range(ord(name), ord(name) + 5), SamplingParams(max_tokens=19), priority=priority)
    assert list(drive.step()[0].num_scheduled_tokens) == ["d", "b", "c"]
    preempted: list[str] = []
    while not preempted:
        preempted += drive.step()[0].preempted_ids
    assert preempted == ["c"]
    drive.run()
    drive.check_clean()


def test_nobody_is_admitted_in_the_step_that_preempts() -> None:
    drive = Drive(toy_resolved(num_drafts=4, block_size=1, num_blocks=27, max_model_len=27), drafter=anti())
    drive.add("a", range(5), SamplingParams(max_tokens=22, speculation=SpeculationParams(enabled=False)))
    drive.add("b", range(10, 15), SamplingParams(max_tokens=20))
    plan, _ = drive.step()
    while not plan.preempted_ids:
        plan, _ = drive.step()
    b = drive.scheduler.requests["b"]
    assert b.num_tokens + 1 <= drive.scheduler.kv.pool.num_free  # its rejected drafts held enough for it to come back at once
    assert (plan.new, list(plan.num_scheduled_tokens)) == ((), ["a"])
    drive.run()
    drive.check_clean()


def test_admission_leaves_each_running_request_a_block_to_grow_into() -> None:
    drive = Drive(toy_resolved(num_blocks=6, max_model_len=17))
    drive.add("a", range(2), SamplingParams(max_tokens=3))
    drive.step()
    drive.add("b", range(20, 36), SamplingParams(max_tokens=1))  # four blocks: as many as are free
    assert [list(drive.step()[0].num_scheduled_tokens) for _ in range(3)] == [["a"], ["a"], ["b"]]
    assert drive.scheduler.num_preemptions == 0


def test_two_that_fit_only_one_after_the_other_both_end() -> None:
    drive = Drive(toy_resolved(num_drafts=4, lookahead=5, num_blocks=5, max_model_len=17), drafter=coin(0.5))
    for name in "ab":
        drive.add(name, range(ord(name), ord(name) + 6), SamplingParams(max_tokens=11))
    drive.run()
    assert all(len(drive.outputs[name]) == 11 for name in "ab")
    drive.check_clean()


# -- prefixes ------------------------------------------------------------------------------------------------------------


def test_a_repeated_prompt_computes_only_its_tail_with_or_without_drafts() -> None:
    cached = []
    for num_drafts in (0, 3):
        drive = Drive(toy_resolved(num_drafts=num_drafts, lookahead=num_drafts, prefill_lookahead=min(num_drafts, 1)), drafter=oracle())
        drive.add("a", range(21), SamplingParams(max_tokens=4))
        drive.run()
        drive.add("b", range(21), SamplingParams(max_tokens=4))
        plan, commits = drive.step()
        assert (plan.num_scheduled_tokens, plan.new[0].num_computed_tokens) == ({"b": 1}, 20)
        assert commits["b"].num_cached_tokens == 20 == drive.scheduler.num_cached_tokens("b")
        assert (drive.scheduler.kv.num_queried_tokens, drive.scheduler.kv.num_hit_tokens) == (42, 20)
        drive.run()
        assert drive.outputs["a"] == drive.outputs["b"]
        cached.append(commits["b"].num_cached_tokens)
    assert cached[0] == cached[1]


def test_prompt_log_probabilities_are_computed_for_every_row() -> None:
    drive = Drive(toy_resolved())
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=1)
    for name in "ab":
        drive.add(name, range(12), sampling)
        assert drive.step()[0].num_scheduled_tokens == {name: 12}
        drive.run()


# -- leaving -------------------------------------------------------------------------------------------------------------


def test_an_end_reaches_the_worker_in_one_more_step_also_without_other_work() -> None:
    drive = Drive(toy_resolved())
    drive.add("a", [1, 2], SamplingParams(max_tokens=1))
    drive.step()
    assert not drive.scheduler.has_work
    assert drive.scheduler.has_unsent_finishes
    plan, _ = drive.step()
    assert (plan.finished, plan.total_num_scheduled_tokens) == ({"a": FinishedRequest("length", 3)}, 0)
    assert not drive.scheduler.has_unsent_finishes
    drive.check_clean()


def test_aborts_of_running_waiting_and_unknown_requests() -> None:
    drive = Drive(toy_resolved(max_num_seqs=1))
    drive.add("a", [1, 2], LONG)
    drive.add("b", [3, 4], LONG)
    drive.step()
    assert drive.scheduler.abort("b")
    assert drive.scheduler.abort("a")
    assert not drive.scheduler.abort("a")
    assert not drive.scheduler.abort("never")
    plan, _ = drive.step()
    assert plan.finished == {"a": FinishedRequest("abort", 3)}  # the worker never knew b
    drive.check_clean()


def test_an_abort_while_preempted_is_told_to_the_worker_which_keeps_the_seed_until_then() -> None:
    drive = Drive(toy_resolved(num_blocks=7, max_model_len=25))
    for name in "ab":
        drive.add(name, range(ord(name), ord(name) + 5), SamplingParams(max_tokens=19))
    while not drive.scheduler.num_preemptions:
        drive.step()
    num_tokens = drive.scheduler.requests["b"].num_tokens
    assert drive.scheduler.abort("b")
    assert drive.step()[0].finished == {"b": FinishedRequest("abort", num_tokens)}
    drive.run()
    drive.check_clean()


def test_a_stop_string_cuts_tokens_before_and_after_the_scheduler_ended_the_request() -> None:
    drive = Drive(toy_resolved(num_drafts=4), drafter=oracle())
    drive.add("a", [1, 2], LONG)
    drive.step()
    drive.step()  # five tokens at once: three of output are kept
    assert drive.scheduler.finish("a", "stop", num_tokens=5)
    assert drive.step()[0].finished == {"a": FinishedRequest("stop", 5)}
    drive.add("b", [1, 2], SamplingParams(max_tokens=6))
    drive.step()
    _, commits = drive.step()
    assert commits["b"].finish_reason == "length"
    assert not drive.scheduler.finish("b", "stop", num_tokens=4)  # it had ended, and is cut all the same
    assert drive.step()[0].finished == {"b": FinishedRequest("stop", 4)}
    drive.add("c", [1, 2], SamplingParams(max_tokens=1))
    drive.step()
    drive.scheduler.finish("c", "stop", num_tokens=9)
    assert drive.step()[0].finished == {"c": FinishedRequest("stop", 3)}  # there are no more than three
    drive.check_clean()


def test_a_failing_request_ends_alone() -> None:
    drive = Drive(toy_resolved(num_drafts=2), drafter=oracle())
    drive.add("a", [1, 2], LONG)
    drive.add("b", [3, 4], LONG)
    drive.step()
    drive.runner.errors["a"] = "no finite logit"
    _, commits = drive.step()
    assert (commits["a"].finish_reason, commits["a"].error, commits["a"].token_ids) == ("error", "no finite logit", ())
    assert commits["b"].finish_reason is None
    drive.run()
    assert drive.outputs["b"] == drive.runner.solo([3, 4], LONG)[0]
    drive.check_clean()


# -- results that come too late ------------------------------------------------------------------------------------------


def test_a_result_from_before_a_preemption_is_dropped_and_counted() -> None:
    resolved = toy_resolved(num_drafts=3, num_blocks=8, max_model_len=25, async_scheduling=True)
    drive = Drive(resolved, drafter=coin(0.7))
    prompts = {name: range(ord(name), ord(name) + 6) for name in "ab"}
    for name, prompt in prompts.items():
        drive.add(name, prompt, SamplingParams(max_tokens=18))
    drive.run(depth=3)
    assert drive.scheduler.num_preemptions > 0
    assert drive.scheduler.num_stale_results > 0
    for name, prompt in prompts.items():
        assert drive.outputs[name] == drive.runner.solo(prompt, SamplingParams(max_tokens=18))[0]
    drive.check_clean()


def test_a_new_request_never_gets_the_results_of_an_old_one_with_its_id() -> None:
    drive = Drive(toy_resolved(num_drafts=3, async_scheduling=True), drafter=oracle())
    drive.add("a", [1, 2, 3], LONG)
    drive.schedule()
    drive.schedule()
    drive.scheduler.abort("a")
    drive.add("a", [7, 8, 9], SamplingParams(max_tokens=9))
    drive.schedule()
    assert (drive.update(), drive.update()) == ({}, {})
    assert drive.scheduler.num_stale_results == 2
    drive.run(depth=2)
    assert drive.outputs["a"] == drive.runner.solo([7, 8, 9], SamplingParams(max_tokens=9))[0]
    drive.check_clean()


def test_steps_in_flight_that_reach_the_limit_are_not_followed_by_another() -> None:
    drive = Drive(toy_resolved(async_scheduling=True))
    drive.add("a", [1, 2], SamplingParams(max_tokens=2))
    assert [drive.schedule().total_num_scheduled_tokens for _ in range(3)] == [2, 1, 0]
    for _ in range(2):
        drive.update()
    assert drive.ends["a"].finish_reason == "length"


def test_a_second_plan_without_async_scheduling_is_a_bug_of_the_caller() -> None:
    drive = Drive(toy_resolved())
    drive.add("a", [1, 2], LONG)
    drive.schedule()
    with pytest.raises(AssertionError, match="1 steps are not committed"):
        drive.scheduler.schedule()


# -- limits of length ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafter", [None, oracle(), anti(), coin(0.5), ragged(coin(0.8))])
def test_generation_ends_at_exactly_max_model_len(drafter: Drafter | None, depth: int) -> None:
    num_drafts = 7 if drafter else 0
    resolved = toy_resolved(
        num_drafts=num_drafts, lookahead=num_drafts, num_blocks=300, max_num_seqs=14, max_num_batched_tokens=900, async_scheduling=depth > 1
    )
    drive = Drive(resolved, drafter=drafter)
    for length in range(50, 64):
        drive.add(str(length), range(length), SamplingParams(max_tokens=1000))
    drive.run(depth=depth)
    for length in range(50, 64):
        assert len(drive.outputs[str(length)]) == 64 - length
        assert drive.outputs[str(length)] == drive.runner.solo(range(length), SamplingParams())[0]
        assert drive.ends[str(length)].finish_reason == "length"
    drive.check_clean()


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_no_row_is_spent_on_drafts_past_max_tokens(max_tokens: int) -> None:
    drive = Drive(toy_resolved(num_drafts=5), drafter=anti())
    drive.add("a", [1, 2], SamplingParams(max_tokens=max_tokens))
    left = []
    while drive.scheduler.has_work:
        plan, _ = drive.step()
        left.append(plan.num_draft_nodes.get("a", 0))
    assert left == [0, *(min(5, max_tokens - 1 - done) for done in range(1, max_tokens))]


@pytest.mark.parametrize("place", range(5))
def test_an_end_of_sequence_ends_the_request_wherever_it_falls(place: int) -> None:
    output = [50, 51, 52, 53, 54, 55, 56]
    output[1 + place] = 5  # the first token comes with the prompt, then a block of four drafts and a bonus token
    drive = Drive(toy_resolved(num_drafts=4, eos_token_ids=(5, 6)), drafter=oracle(), target=scripted_target(output))
    drive.add("a", [1, 2], LONG)
    drive.run()
    assert drive.outputs["a"] == output[: 2 + place]
    assert drive.ends["a"].finish_reason == "stop"
    assert drive.ends["a"].num_verified == 4
    assert drive.ends["a"].num_accepted == min(place + 1, 4)
    drive.check_clean()


# -- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "text"),
    [
        (0, 4, "the prompt has 0 tokens"),
        (64, 4, "the prompt has 64 tokens, but with one output token it must fit max_model_len 64"),
        (30, 12, "may reach 42 tokens in 11 KV blocks, but the cache has 10 blocks"),
        (30, None, "may reach 64 tokens in 16 KV blocks"),
    ],
)
def test_what_can_never_run_is_refused_with_its_numbers(prompt: int, max_tokens: int | None, text: str) -> None:
    drive = Drive(toy_resolved(num_blocks=11))
    with pytest.raises(RequestRejected, match=text):
        drive.add("a", range(prompt), SamplingParams(max_tokens=max_tokens))
    drive.add("a", range(30), SamplingParams(max_tokens=11))  # 40 slots: the last token needs none
    drive.run()
    drive.check_clean()


def test_an_id_in_use_is_refused() -> None:
    drive = Drive(toy_resolved())
    drive.add("a", [1], LONG)
    with pytest.raises(RequestRejected, match="'a' is already running"):
        drive.scheduler.add(Request(request_id="a", prompt_token_ids=(1,), sampling=LONG))


def test_the_queue_limit_spares_those_that_run() -> None:
    drive = Drive(toy_resolved(max_num_seqs=1, max_waiting=1))
    drive.add("a", [1], LONG)
    drive.step()
    drive.add("b", [1], LONG)
    with pytest.raises(QueueFull, match="1 requests are waiting, and max_waiting is 1"):
        drive.add("c", [1], LONG)
    assert "c" not in drive.scheduler.requests


def test_a_budget_too_small_for_one_request_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 4, but one request's step needs 5"):
        Scheduler(toy_resolved(num_drafts=3, draft_slots=2, prefill_lookahead=3, max_num_batched_tokens=4), 64, FixedPolicy(3))


# -- per request ---------------------------------------------------------------------------------------------------------


def test_speculation_follows_each_requests_wish() -> None:
    drive = Drive(toy_resolved(num_drafts=4), drafter=oracle())
    wishes = {
        "all": SpeculationParams(),
        "two": SpeculationParams(num_speculative_tokens=2),
        "off": SpeculationParams(enabled=False),
        "own": SpeculationParams(method="suffix"),
    }
    for index, (name, wish) in enumerate(wishes.items()):
        drive.add(name, [index, 2], SamplingParams(max_tokens=20, speculation=wish))
    plan, _ = drive.step()
    assert plan.drafts_next == {"all": DraftOrder(4), "two": DraftOrder(2), "off": DraftOrder(0), "own": DraftOrder(4, "suffix")}
    plan, _ = drive.step()
    assert plan.num_draft_nodes == {"all": 4, "two": 2, "own": 4}
    assert plan.num_scheduled_tokens == {"all": 5, "two": 3, "off": 1, "own": 5}


def test_structured_requests_are_named_when_they_sample() -> None:
    drive = Drive(toy_resolved(max_num_batched_tokens=6))
    drive.add("plain", [1, 2], LONG)
    drive.add("json", range(6), SamplingParams(max_tokens=4, structured=StructuredOutputParams(json_object=True)))
    assert [drive.step()[0].grammar_ids for _ in range(3)] == [(), ("json",), ("json",)]


def test_the_worker_learns_of_a_request_once_then_of_its_changes() -> None:
    drive = Drive(toy_resolved(block_size=2))
    drive.scheduler.add(Request(request_id="a", prompt_token_ids=(4, 5, 6), sampling=LONG, tenant="key"))
    drive.outputs["a"], drive.commits["a"] = [], []
    plan, _ = drive.step()
    new = plan.new[0]
    assert (new.token_ids, new.num_prompt_tokens, new.block_ids, new.num_computed_tokens, new.tenant) == ((4, 5, 6), 3, (1, 2), 0, "key")
    changes = [drive.step()[0].cached[0] for _ in range(3)]
    assert [(c.new_block_ids, c.num_computed_tokens) for c in changes] == [((), 3), ((3,), 4), ((), 5)]
