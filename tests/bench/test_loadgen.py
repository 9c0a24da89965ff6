"""The measuring client: its arithmetic on samples made by hand, and its streaming against a scripted server."""

from __future__ import annotations

import asyncio
import json

import pytest

from specdec.errors import ConfigError
from specdec.tools.loadgen import (
    Client,
    Load,
    Sample,
    arrival_times,
    measure,
    middle,
    parse_counters,
    quantile_ms,
    run_and_print,
    summarise,
)
from tests.bench.fake_server import PIECES, TOKENS_PER_ANSWER, fake_server


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


def test_counters_sum_over_labels_and_prefer_our_names() -> None:
    text = 'specdec_num_drafts_total{a="1"} 3\nspecdec_num_drafts_total{a="}"} 4.0\nvllm:spec_decode_num_drafts_total 99\n'
    assert parse_counters(text) == {"num_drafts": 7.0}
    assert parse_counters('vllm:spec_decode_num_accepted_tokens_total{m="x"} 5 1700000000\nother 1') == {"num_accepted_tokens": 5.0}
    assert parse_counters("") == {}


def test_arrivals_are_poisson_seeded_and_start_at_once() -> None:
    times = arrival_times(4000, 8.0, seed=1)
    assert times[0] == 0.0
    assert times == arrival_times(4000, 8.0, seed=1) != arrival_times(4000, 8.0, seed=2)
    assert times[-1] / 3999 == pytest.approx(1 / 8, rel=0.05)
    assert arrival_times(1, 1.0, seed=0) == [0.0]


@pytest.mark.parametrize("load", [Load(concurrency=3, max_tokens=17), Load(rate=200.0, max_tokens=17)])
def test_streams_are_measured_and_counters_are_differences(load: Load) -> None:
    async def go(url: str) -> None:
        done: list[int] = []
        async with Client(url + "/v1/") as client:
            await client.complete("before the measurement", 1)
            summary = await measure(client, [f"prompt {i}" for i in range(6)], load, on_done=lambda: done.append(1))
        assert len(done) == 6
        assert summary.num_errors == 0
        assert summary.num_tokens == 6 * TOKENS_PER_ANSWER
        assert summary.num_drafts == summary.num_accepted_tokens == 24  # of these six, not of the one before
        assert summary.acceptance_length == 2.0
        assert summary.num_draft_tokens == 0.0
        assert summary.acceptance_rate is None

    with fake_server() as server:
        asyncio.run(go(server.url))
        prompts = sorted(body["messages"][0]["content"] for body in server.bodies[1:])
        assert prompts == [f"prompt {i}" for i in range(6)]
        body = server.bodies[-1]
        assert (body["temperature"], body["max_tokens"], body["stream"]) == (0, 17, True)
        assert "ignore_eos" not in body


def test_one_event_per_piece_of_text_and_refusals_are_samples() -> None:
    async def go(url: str) -> tuple[Sample, Sample]:
        async with Client(url) as client:
            return await client.complete("hello", 8), await client.complete("please FAIL", 8)

    with fake_server() as server:
        good, bad = asyncio.run(go(server.url))
    assert len(good.event_s) == len(PIECES)
    assert good.num_prompt_tokens == 3
    assert bad.error == 'HTTP 400: {"error": {"message": "told to fail", "type": "invalid_request_error"}}'


def test_no_server_is_an_error_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"no model is served at http://127.0.0.1:9") as caught:
        run_and_print("http://127.0.0.1:9", Load(num_requests=1))
    assert "specdec serve" in str(caught.value.hint)


def test_bench_prints_a_table_and_a_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        run_and_print(server.url, Load(num_requests=3, concurrency=2))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fake: chat, 2 in flight, 3 requests, 0 errors"
    assert "  acceptance_length  2.00" in lines
    assert json.loads(lines[-1])["num_tokens"] == 3 * TOKENS_PER_ANSWER


def test_middle_is_median_and_spread() -> None:
    runs = [summarise([sample(1.0, num_tokens=n)], wall_s=1.0, counters={}) for n in (10, 40, 20)]
    assert middle(runs, "tok_per_s") == (20.0, 10.0, 40.0)
    assert middle(runs, "acceptance_length") is None
