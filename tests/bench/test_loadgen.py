"""The measuring client against a scripted server: streams, counters, arrivals."""

from __future__ import annotations

import asyncio

import pytest

from specdec.tools.loadgen import Client, Load, arrival_times, measure, parse_counters
from specdec.tools.samples import Sample
from tests.bench.fake_server import PIECES, TOKENS_PER_ANSWER, fake_server


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
