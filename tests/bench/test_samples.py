"""Figures of samples made by hand."""

from __future__ import annotations

import pytest

from specdec.tools.samples import Sample, middle, quantile_ms, summarise


def sample(*event_s: float, num_tokens: int, error: str | None = None) -> Sample:
    return Sample(start_s=0.0, event_s=list(event_s), end_s=event_s[-1], num_tokens=num_tokens, error=error)


def test_tpot_counts_tokens_and_itl_counts_events() -> None:
    plain = sample(0.1, 0.2, 0.3, 0.4, 0.5, num_tokens=5)
    speculated = sample(0.1, 0.2, 0.3, num_tokens=9)  # three events, nine tokens
    assert plain.ttft_s == pytest.approx(0.1)
    assert plain.tpot_s == pytest.approx(0.1)
    assert speculated.tpot_s == pytest.approx(0.2 / 8)
    assert speculated.itl_s == pytest.approx([0.1, 0.1])
    assert sample(0.1, num_tokens=1).tpot_s is None


def test_failed_requests_give_no_tokens_and_no_latencies() -> None:
    summary = summarise([sample(1.0, num_tokens=10), sample(9.0, num_tokens=99, error="HTTP 500")], wall_s=2.0, counters={})
    assert (summary.num_requests, summary.num_errors, summary.num_tokens) == (2, 1, 10)
    assert summary.tok_per_s == pytest.approx(5.0)
    assert summary.ttft_ms_p99 == pytest.approx(1000.0)
    assert summary.tpot_ms_p50 == pytest.approx(0.0)
    assert summary.acceptance_length is None


def test_quantiles_interpolate() -> None:
    assert quantile_ms([0.001, 0.002, 0.003, 0.004], 0.5) == pytest.approx(2.5)
    assert quantile_ms([0.003, 0.001], 0.99) == pytest.approx(2.98)
    assert quantile_ms([], 0.5) is None


def test_middle_is_median_and_spread() -> None:
    runs = [summarise([sample(1.0, num_tokens=n)], wall_s=1.0, counters={}) for n in (10, 40, 20)]
    assert middle(runs, "tok_per_s") == (20.0, 10.0, 40.0)
    assert middle(runs, "acceptance_length") is None
