"""Outputs travel from the engine thread to readers: merged when they pile up, one wake-up for each loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from specdec.engine.delivery import MAX_PENDING, Channel, Mailbox, merge
from specdec.engine.types import DraftTrace, EngineOutput, SpecDecodeRequestStats
from specdec.errors import EngineDeadError
from specdec.scheduler.output import TokenLogprobs


def output(index: int, *, last: bool = False, trace: DraftTrace | None = None) -> EngineOutput:
    return EngineOutput(
        request_id="r",
        text=f"<{index}>",
        token_ids=(index,),
        logprobs=(TokenLogprobs(index, -0.5, 1),),
        prompt_logprobs=(None,) if index == 0 else None,
        num_cached_tokens=7 if index == 0 else 0,
        finish_reason="stop" if last else None,
        stop_reason="!" if last else None,
        stats=SpecDecodeRequestStats(num_drafts=3) if last else None,
        trace=trace,
    )


def test_merging_keeps_order_first_facts_and_last_facts() -> None:
    merged = merge([output(0), output(1), output(2, last=True)])
    assert (merged.text, merged.token_ids) == ("<0><1><2>", (0, 1, 2))
    assert merged.logprobs is not None
    assert [entry.token_id for entry in merged.logprobs] == [0, 1, 2]
    assert (merged.finish_reason, merged.stop_reason, merged.num_cached_tokens) == ("stop", "!", 7)
    assert merged.prompt_logprobs == (None,)
    assert merged.stats is not None
    assert merged.stats.num_drafts == 3


def test_a_slow_reader_gets_everything_in_one_output_and_little_is_kept() -> None:
    async def run() -> None:
        channel = Channel("r", Mailbox(asyncio.get_running_loop()), keep_steps=False)
        for index in range(1000):
            channel.put(output(index))
            assert len(channel._pending) < MAX_PENDING
        channel.put(output(1000, last=True))
        got = await channel.get()
        assert got is not None
        assert got.token_ids == tuple(range(1001))
        assert await channel.get() is None

    asyncio.run(run())


def test_traced_steps_stay_apart() -> None:
    async def run() -> None:
        channel = Channel("r", Mailbox(asyncio.get_running_loop()), keep_steps=True)
        for index in range(40):
            channel.put(output(index, trace=DraftTrace("ngram", (index,), 1)))
        got = [await channel.get() for _ in range(40)]
        assert [entry.trace.draft_token_ids for entry in got if entry and entry.trace] == [(index,) for index in range(40)]

    asyncio.run(run())


def test_an_error_comes_after_what_was_put_before_it() -> None:
    async def run() -> None:
        channel = Channel("r", Mailbox(asyncio.get_running_loop()), keep_steps=False)
        channel.put(output(0))
        channel.fail(EngineDeadError("gone"))
        got = await channel.get()
        assert got is not None
        assert got.token_ids == (0,)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="gone"):
                await channel.get()

    asyncio.run(run())


def test_closing_asks_for_an_abort_once_and_only_while_the_request_runs() -> None:
    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        running, ended = Channel("r", mailbox, keep_steps=False), Channel("e", mailbox, keep_steps=False)
        ended.put(output(0, last=True))
        assert (running.close(), running.close(), ended.close()) == (True, False, False)
        running.put(output(1))
        assert await running.get() is None

    asyncio.run(run())


def test_wake_ups_of_a_busy_loop_become_one() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        calls = 0
        real = loop.call_soon_threadsafe

        def counted(callback, *args):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            return real(callback, *args)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        mailbox = Mailbox(loop)
        channels = [Channel(str(index), mailbox, keep_steps=False) for index in range(8)]

        def engine_steps() -> None:
            for step in range(50):
                for channel in channels:
                    channel.put(output(step))
                assert mailbox.wake(channels)

        thread = threading.Thread(target=engine_steps)
        thread.start()
        thread.join()  # the loop is blocked meanwhile, as by a slow handler
        assert calls == 1
        got = [await channel.get() for channel in channels]
        assert all(entry is not None and len(entry.token_ids) == 50 for entry in got)

    asyncio.run(run())


def test_a_closed_loop_is_reported() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    channel = Channel("r", mailbox, keep_steps=False)
    loop.close()
    assert not mailbox.wake([channel])
    assert not mailbox.wake([channel])  # and again: a failed wake-up leaves nothing behind that looks scheduled
