"""Counters say what was proposed, verified and emitted; times keep events and tokens apart."""

from __future__ import annotations

import logging

import pytest

from specdec.metrics.stats import EngineStats, FinishedTimes, Histogram, IntervalLog, SpecDecodeStats, StepGauges


def finished(reason: str, **times: float | int | None) -> FinishedTimes:
    defaults: dict[str, float | int | None] = {
        "num_prompt_tokens": 5,
        "num_output_tokens": 9,
        "arrival_s": 0.0,
        "scheduled_s": 1.0,
        "first_token_s": 2.0,
        "last_token_s": 4.0,
        "finished_s": 4.5,
    }
    return FinishedTimes(reason=reason, **(defaults | times))  # type: ignore[arg-type]


def test_a_value_on_an_edge_falls_into_the_bucket_below() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert (histogram.count, histogram.sum, histogram.mean) == (5, 7.5, 1.5)


def test_rates_follow_their_definitions() -> None:
    spec = SpecDecodeStats()
    spec.observe("ngram", 4, num_accepted=4, num_verified=4)
    spec.observe("ngram", 4, num_accepted=1, num_verified=3)  # a stop trimmed two verified drafts
    spec.observe("suffix", 2, num_accepted=0, num_verified=0, num_invalid=1)
    spec.observe("", 0, num_accepted=0, num_verified=0)  # a plain step is no speculative one
    assert (spec.total.num_drafts, spec.total.num_draft_tokens) == (3, 10)
    assert (spec.total.num_accepted_tokens, spec.total.num_verified_tokens, spec.num_invalid_tokens) == (5, 7, 1)
    assert spec.acceptance_rate == 0.5
    assert spec.acceptance_length == pytest.approx(1 + 5 / 3)
    assert spec.drafted_per_pos == [3, 3, 2, 2]
    assert spec.accepted_per_pos == [2, 1, 1, 1]
    assert spec.verified_per_pos == [2, 2, 2, 1]
    assert spec.acceptance_rate_per_pos == pytest.approx([2 / 3, 1 / 3, 1 / 3, 1 / 3])
    assert spec.by_source["ngram"].acceptance_length == 3.5
    assert spec.by_source["suffix"].acceptance_rate == 0.0
    assert "" not in spec.by_source


def test_without_drafts_the_rates_are_neutral() -> None:
    spec = SpecDecodeStats()
    assert (spec.acceptance_rate, spec.acceptance_length, spec.tokens_per_target_pass, spec.acceptance_rate_per_pos) == (0.0, 1.0, 0.0, [])


def test_the_first_token_is_ttft_and_later_events_are_itl() -> None:
    stats = EngineStats()
    stats.observe_output(1, now_s=2.0, arrival_s=0.5, last_token_s=None)
    stats.observe_output(4, now_s=2.3, arrival_s=0.5, last_token_s=2.0)
    assert (stats.time_to_first_token_s.count, stats.time_to_first_token_s.sum) == (1, 1.5)
    assert stats.inter_token_latency_s.count == 1  # one event, though it brought four tokens
    assert stats.num_generation_tokens == 5
    assert stats.spec.tokens_per_target_pass == 4.0


def test_time_per_output_token_is_decode_time_over_tokens_less_one() -> None:
    stats = EngineStats()
    stats.observe_finished(finished("stop"))
    assert stats.time_per_output_token_s.sum == pytest.approx(2.0 / 8)
    assert (stats.queue_time_s.sum, stats.prefill_time_s.sum, stats.decode_time_s.sum, stats.e2e_latency_s.sum) == (1.0, 1.0, 2.0, 4.5)
    stats.observe_finished(finished("length", num_output_tokens=1, last_token_s=2.0))
    assert stats.time_per_output_token_s.count == 1  # one token has no time per output token
    assert stats.num_requests_by_reason == {"stop": 1, "length": 1, "abort": 0, "error": 0}


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_latencies_of_requests_that_did_not_end_are_left_out(reason: str) -> None:
    stats = EngineStats()
    stats.observe_finished(finished(reason, first_token_s=None, last_token_s=None))
    assert stats.num_requests_by_reason[reason] == 1
    assert stats.e2e_latency_s.count == stats.queue_time_s.count == 0


def test_a_snapshot_does_not_move() -> None:
    stats = EngineStats()
    stats.spec.observe("ngram", 2, num_accepted=1, num_verified=1)
    before = stats.snapshot()
    stats.spec.observe("ngram", 2, num_accepted=2, num_verified=2)
    stats.observe_step(7, durations_s=[("forward", 0.02)], gauges=StepGauges(num_running=3))
    assert before.spec.total.num_accepted_tokens == 1
    assert before.spec.by_source["ngram"].num_drafts == 1
    assert (before.num_steps, before.gauges.num_running) == (0, 0)
    assert stats.snapshot().step_duration_s["forward"].sum == 0.02


def test_one_line_per_busy_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stats = EngineStats()
    log = IntervalLog(stats, now_s=100.0)
    stats.observe_prompt(50, num_cached_tokens=0)
    stats.num_generation_tokens += 200
    stats.spec.observe("ngram", 4, num_accepted=3, num_verified=3)
    stats.gauges = StepGauges(num_running=2, num_waiting=1, kv_cache_usage=0.25)
    assert log.tick(109.9) is None
    assert log.tick(110.0) == (
        "running 2, waiting 1, KV cache 25.0% used, prompt 5.0 tok/s, generation 20.0 tok/s, "
        "acceptance length 4.00, accepted 3 of 4 drafts (75.0%)"
    )
    assert log.tick(120.0) is None  # nothing happened
    stats.num_generation_tokens += 10
    line = log.tick(130.0)
    assert line is not None
    assert "acceptance" not in line  # no drafts in this interval
    assert len(caplog.records) == 2


def test_what_goes_wrong_in_a_drafter_is_exported_by_kind() -> None:
    from specdec.metrics.prometheus import Exporter, Identity

    stats = EngineStats()
    stats.observe_step(1, durations_s=(), gauges=StepGauges(drafter_bytes=4096, drafter_faults={"late": 3, "crash": 1}))
    identity = Identity(model_name="m", version="0", method="custom_class", device="cpu", dtype="float32", max_nodes=4)
    text = Exporter(lambda: stats, identity).render("")[0].decode()
    assert 'specdec_drafter_faults_total{kind="late",model_name="m"} 3.0' in text
    assert 'specdec_drafter_faults_total{kind="crash",model_name="m"} 1.0' in text
    assert 'specdec_drafter_memory_bytes{model_name="m"} 4096.0' in text
