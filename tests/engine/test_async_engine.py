"""AsyncEngine: many readers, one engine thread; clients that leave, queues that fill, engines that die."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from specdec.engine.async_engine import AsyncEngine
from specdec.engine.core import EngineCore
from specdec.engine.tokenizer import Tokenizer
from specdec.engine.types import EngineOutput, EngineRequest
from specdec.errors import EngineDeadError, QueueFull, RequestRejected
from specdec.sampling_params import SamplingParams
from tests.toy import Drafter, Target, ToyRunner, coin, hash_target, oracle, toy_resolved

EOS = 96


class Gate:
    """A toy target that a test can hold: each token waits until the gate is open."""

    def __init__(self, *, is_open: bool) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()
        self._target = hash_target(vocab_size=90)
        if is_open:
            self.opened.set()

    def __call__(self, history: Sequence[int], num_prompt: int) -> int:
        self.entered.set()
        assert self.opened.wait(30)
        return self._target(history, num_prompt)


@asynccontextmanager
async def serving(
    tokenizer: Tokenizer, *, drafter: Drafter | None = None, target: Target | None = None, **options: Any
) -> AsyncIterator[tuple[AsyncEngine, ToyRunner]]:
    resolved = toy_resolved(eos_token_ids=(EOS,), **options)
    runner = ToyRunner.for_config(resolved, drafter=drafter, target=target or hash_target(eos_token_id=EOS))
    engine = AsyncEngine(EngineCore(resolved, runner, tokenizer=tokenizer))
    try:
        yield engine, runner
    finally:
        if isinstance(target, Gate):
            target.opened.set()
        await engine.shutdown(drain_s=0)


def request(request_id: str, prompt: Sequence[int] = (5, 6, 7), *, track_drafts: bool = False, **sampling: Any) -> EngineRequest:
    params = SamplingParams(**sampling)
    arrival_s = time.monotonic()
    return EngineRequest(
        request_id=request_id, prompt_token_ids=tuple(prompt), sampling=params, arrival_s=arrival_s, track_drafts=track_drafts
    )


async def collect(engine: AsyncEngine, entry: EngineRequest) -> list[EngineOutput]:
    return [output async for output in engine.generate(entry)]


async def read_to_the_end(stream: AsyncIterator[EngineOutput]) -> None:
    async for _ in stream:
        pass


async def until(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        await asyncio.sleep(0.002)


def on_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def test_concurrent_streams_each_get_their_solo_answer(toy: Tokenizer) -> None:
    async def test() -> None:
        async with serving(toy, drafter=coin(0.6), num_drafts=4, num_blocks=40) as (engine, runner):
            requests = [request(str(index), range(index % 9, index % 9 + 4), max_tokens=5 + index % 20) for index in range(48)]
            answers = await asyncio.gather(*(collect(engine, entry) for entry in requests))
            for entry, outputs in zip(requests, answers, strict=True):
                token_ids, finish_reason, _ = runner.solo(entry.prompt_token_ids, entry.sampling)
                assert [token_id for output in outputs for token_id in output.token_ids] == token_ids
                assert "".join(output.text for output in outputs) == toy.decode(token_ids)
                assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [finish_reason]
            await until(lambda: not runner.rows)
            assert engine.num_unfinished == 0
            assert engine.stats.num_generation_tokens == sum(len(o.token_ids) for outputs in answers for o in outputs)

    on_loop(test)


@pytest.mark.parametrize("how", ["aclose", "cancel", "drop", "abort"])
def test_a_client_that_leaves_frees_its_request(toy: Tokenizer, how: str) -> None:
    async def test() -> None:
        gate = Gate(is_open=True)
        async with serving(toy, drafter=oracle(), target=gate, num_drafts=1, max_model_len=4000, num_blocks=1200) as (engine, runner):
            stream = engine.generate(request("r", max_tokens=3900))
            await anext(stream)
            if how == "aclose":
                await stream.aclose()
            elif how == "drop":
                del stream
                gc.collect()
            elif how == "cancel":
                gate.opened.clear()

                task = asyncio.create_task(read_to_the_end(stream))
                await asyncio.sleep(0.02)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                gate.opened.set()
            else:
                engine.abort("r")
                outputs = [output async for output in stream]
                assert outputs[-1].finish_reason == "abort"
            await until(lambda: engine.num_unfinished == 0 and not runner.rows)
            assert runner.released == {"r": "abort"}
            assert engine.stats.num_requests_by_reason["abort"] == 1
            assert engine.is_alive

    on_loop(test)


def test_a_full_queue_refuses_and_recovers(toy: Tokenizer) -> None:
    async def test() -> None:
        gate = Gate(is_open=False)
        async with serving(toy, target=gate, max_num_seqs=1, max_waiting=2) as (engine, _):
            running = asyncio.create_task(collect(engine, request("runs", max_tokens=3)))
            await until(gate.entered.is_set)
            waiting = [engine.generate(request(f"waits{index}", max_tokens=3)) for index in range(2)]
            with pytest.raises(QueueFull, match="2 requests wait already, the limit is 2"):
                engine.generate(request("too many"))
            gate.opened.set()
            await running
            for stream in waiting:
                assert [output async for output in stream][-1].finish_reason == "length"
            assert (await collect(engine, request("later", max_tokens=1)))[-1].finish_reason == "length"

    on_loop(test)


def test_bad_requests_are_refused_at_once_or_by_their_stream_and_the_engine_goes_on(toy: Tokenizer) -> None:
    async def test() -> None:
        gate = Gate(is_open=False)
        async with serving(toy, target=gate, num_blocks=5) as (engine, _):
            with pytest.raises(RequestRejected, match="empty"):
                engine.generate(request("empty", ()))
            stream = engine.generate(request("never fits", range(30), max_tokens=30))
            with pytest.raises(RequestRejected, match="KV blocks"):
                await anext(stream)
            first = engine.generate(request("same", max_tokens=2))
            with pytest.raises(RequestRejected, match="'same' is in use"):
                engine.generate(request("same"))
            gate.opened.set()
            assert [output async for output in first][-1].finish_reason == "length"
            assert engine.is_alive

    on_loop(test)


def test_when_a_step_raises_every_stream_ends_with_the_reason(toy: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        gate = Gate(is_open=False)
        async with serving(toy, target=gate) as (engine, runner):
            streams = [engine.generate(request(str(index), max_tokens=50)) for index in range(3)]
            await until(gate.entered.is_set)
            runner.raises = RuntimeError("illegal address")
            gate.opened.set()
            for stream in streams:
                with pytest.raises(EngineDeadError, match="RuntimeError: illegal address"):
                    await read_to_the_end(stream)
            await until(lambda: not engine.is_alive)
            assert engine.error is not None
            with pytest.raises(EngineDeadError, match="illegal address"):
                engine.generate(request("late"))

    on_loop(test)
    assert "the engine died in a step" in caplog.text
    assert "num_computed_tokens" in caplog.text  # the states of the requests are dumped


def test_shutdown_lets_running_requests_end(toy: Tokenizer) -> None:
    async def test() -> None:
        gate = Gate(is_open=False)
        async with serving(toy, target=gate) as (engine, runner):
            stream = engine.generate(request("r", max_tokens=20))
            await until(gate.entered.is_set)
            stopping = asyncio.create_task(engine.shutdown(drain_s=20))
            await asyncio.sleep(0.01)
            with pytest.raises(EngineDeadError, match="shutting down"):
                engine.generate(request("late"))
            gate.opened.set()
            outputs = [output async for output in stream]
            assert outputs[-1].finish_reason == "length"
            assert sum(len(output.token_ids) for output in outputs) == 20
            await stopping
            assert not engine.is_alive
            assert runner.is_closed

    on_loop(test)


def test_shutdown_aborts_what_does_not_end_in_time(toy: Tokenizer) -> None:
    async def test() -> None:
        async with serving(toy, target=Gate(is_open=True), max_model_len=4000, num_blocks=1200) as (engine, _):
            stream = engine.generate(request("r", max_tokens=3900))
            await anext(stream)
            await engine.shutdown(drain_s=0.01)
            outputs = [output async for output in stream]
            assert outputs[-1].finish_reason == "abort"

    on_loop(test)


def test_a_slow_reader_gets_larger_outputs_and_loses_nothing(toy: Tokenizer) -> None:
    async def test() -> None:
        async with serving(toy, target=hash_target(vocab_size=90), max_model_len=600, num_blocks=200) as (engine, runner):
            entry = request("r", max_tokens=500, logprobs=0)
            stream = engine.generate(entry)
            await until(lambda: engine.num_unfinished == 0)
            outputs = [output async for output in stream]
            assert len(outputs) == 1
            assert list(outputs[0].token_ids) == runner.solo(entry.prompt_token_ids, entry.sampling)[0]
            assert outputs[0].text == toy.decode(outputs[0].token_ids)
            assert outputs[0].logprobs is not None
            assert len(outputs[0].logprobs) == 500

    on_loop(test)


def test_traced_requests_get_one_output_for_each_step(toy: Tokenizer) -> None:
    async def test() -> None:
        async with serving(toy, drafter=oracle(), target=hash_target(vocab_size=90), num_drafts=3) as (engine, _):
            stream = engine.generate(request("r", max_tokens=41, track_drafts=True))
            await until(lambda: engine.num_unfinished == 0)
            outputs = [output async for output in stream]
            assert [len(output.token_ids) for output in outputs] == [1] + [4] * 10
            for output in outputs[1:]:
                assert output.trace is not None
                assert output.trace.draft_token_ids == output.token_ids[:3]
                assert output.trace.num_accepted == 3

    on_loop(test)


def test_the_age_of_the_last_step_grows_only_while_work_hangs(toy: Tokenizer) -> None:
    async def test() -> None:
        gate = Gate(is_open=False)
        async with serving(toy, target=gate) as (engine, _):
            await asyncio.sleep(0.05)
            assert engine.last_step_age_s == 0.0
            reading = asyncio.create_task(collect(engine, request("hangs", max_tokens=2)))
            await until(lambda: engine.last_step_age_s > 0.05)
            assert engine.describe_requests()["hangs"]["num_in_flight_tokens"] == 3
            gate.opened.set()
            await reading
            await until(lambda: engine.last_step_age_s == 0.0)

    on_loop(test)


def test_an_idle_engine_takes_no_steps_and_no_time(toy: Tokenizer) -> None:
    async def test() -> None:
        async with serving(toy) as (engine, runner):
            await collect(engine, request("r", max_tokens=3))
            await until(lambda: not runner.rows)
            num_plans, cpu_s = len(runner.plans), time.process_time()
            await asyncio.sleep(0.2)
            assert len(runner.plans) == num_plans
            assert time.process_time() - cpu_s < 0.1
            assert engine.is_alive

    on_loop(test)


def test_readers_on_several_event_loops_share_the_engine(toy: Tokenizer) -> None:
    resolved = toy_resolved(eos_token_ids=(EOS,))
    runner = ToyRunner.for_config(resolved, target=hash_target(eos_token_id=EOS))
    engine = AsyncEngine(EngineCore(resolved, runner, tokenizer=toy))
    answers: dict[str, list[int]] = {}

    def client(name: str) -> None:
        outputs = asyncio.run(collect(engine, request(name, max_tokens=12)))
        answers[name] = [token_id for output in outputs for token_id in output.token_ids]

    threads = [threading.Thread(target=client, args=(str(index),)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    engine.close()
    expected = runner.solo((5, 6, 7), SamplingParams(max_tokens=12))[0]
    assert answers == {str(index): expected for index in range(4)}


def test_a_reader_whose_loop_is_gone_does_not_keep_its_request(toy: Tokenizer) -> None:
    resolved = toy_resolved(max_model_len=4000, num_blocks=1200)
    runner = ToyRunner.for_config(resolved, target=Gate(is_open=True))
    engine = AsyncEngine(EngineCore(resolved, runner, tokenizer=toy))
    streams = []

    async def start() -> None:
        streams.append(engine.generate(request("r", max_tokens=3900)))
        await anext(streams[0])

    asyncio.run(start())
    deadline_s = time.monotonic() + 10
    while engine.num_unfinished and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert engine.num_unfinished == 0
    assert engine.is_alive
    engine.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_random_aborts_under_preemption_leave_the_others_exact(toy: Tokenizer, async_scheduling: bool) -> None:
    async def test() -> None:
        dice = random.Random(7)
        options = {"num_drafts": 4, "num_blocks": 16, "max_num_seqs": 6, "async_scheduling": async_scheduling}
        async with serving(toy, drafter=coin(0.7), **options) as (engine, runner):
            survivors = 0

            async def client(index: int) -> None:
                nonlocal survivors
                entry = request(str(index), range(index % 7, index % 7 + 5), max_tokens=20 + index % 20, ignore_eos=True)
                num_read = dice.choice([0, 1, 3, 1000])
                await asyncio.sleep(dice.random() * 0.01)
                outputs = []
                stream = engine.generate(entry)
                while len(outputs) < num_read and (output := await anext(stream, None)) is not None:
                    outputs.append(output)
                if num_read < 1000:
                    await stream.aclose()
                    return
                token_ids, finish_reason, _ = runner.solo(entry.prompt_token_ids, entry.sampling)
                assert [token_id for output in outputs for token_id in output.token_ids] == token_ids
                assert outputs[-1].finish_reason == finish_reason
                survivors += 1

            await asyncio.gather(*(client(index) for index in range(80)))
            assert survivors > 10
            await until(lambda: engine.num_unfinished == 0 and not runner.rows)
            assert engine.stats.gauges.kv_cache_usage == 0.0
            assert engine.stats.gauges.num_preemptions > 0

    on_loop(test)
