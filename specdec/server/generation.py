"""Generation: several engine requests as one answer, streamed side by side or collected.

Owns: fan-out, merging of streams, what each choice gathered. Must not know: the JSON of any route.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from specdec.engine.async_engine import AsyncEngine, OutputStream
from specdec.engine.types import DraftTrace, EngineOutput, EngineRequest, SpecDecodeRequestStats
from specdec.errors import RequestRejected, SpecdecError
from specdec.scheduler.output import TokenLogprobs
from specdec.server.openai_errors import GenerationFailed, ServerDraining

MAX_SEQUENCES = 2048  # of one request: each costs the event loop some time before any can run


@dataclass(slots=True)
class Collected:
    """Everything one choice produced so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    stats: SpecDecodeRequestStats | None = None
    traces: list[DraftTrace] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(self.texts)

    def add(self, output: EngineOutput) -> None:
        """Take in one output."""
        self.texts.append(output.text)
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs or ())
        self.count(output)

    def count(self, output: EngineOutput) -> None:
        """Take in what is not text or tokens; streams, which show those at once, need no more."""
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.num_cached_tokens += output.num_cached_tokens
        self.stats = output.stats or self.stats
        if output.trace is not None:
            self.traces.append(output.trace)


def start(engine: AsyncEngine, requests: Sequence[EngineRequest]) -> list[OutputStream]:
    """Queue all requests, or none.

    Raises:
        RequestRejected: they are more than the engine ever holds, so that trying again could not help.
        SpecdecError: one was refused; those before it are aborted.
    """
    require_capacity(engine, len(requests))
    streams: list[OutputStream] = []
    try:
        for request in requests:
            streams.append(engine.generate(request))
    except SpecdecError:
        for stream in streams:
            stream.close()
        raise
    return streams


def require_capacity(engine: AsyncEngine, num_sequences: int) -> None:
    """Refuse more sequences than the engine ever holds, or MAX_SEQUENCES where it has no limit, best before any of them is made.

    Raises:
        RequestRejected: trying again could not help.
    """
    limit = engine.capacity or MAX_SEQUENCES
    if num_sequences > limit:
        raise RequestRejected(
            f"the request asks for {num_sequences} sequences, but the engine holds {limit}",
            param="prompt",
            hint="send fewer prompts, or a lower n",
        )


async def merged(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, EngineOutput], None]:
    """Yield (index, output) of all streams as they come. Closing this closes all of them.

    Raises:
        GenerationFailed: the engine ended a request with an error.
        ServerDraining: the engine aborted a request that nobody asked to abort: it is shutting down.
    """
    if len(streams) == 1:
        try:
            async for output in streams[0]:
                yield 0, _checked(output)
        finally:
            streams[0].close()
        return
    queue: asyncio.Queue[tuple[int, EngineOutput | BaseException | None]] = asyncio.Queue(maxsize=2 * len(streams))
    pumps = [asyncio.ensure_future(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            index, item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, _checked(item)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for stream in streams:
            stream.close()


async def collect(streams: Sequence[OutputStream]) -> list[Collected]:
    """Return what every stream produced, in order; errors as in `merged`."""
    choices = [Collected() for _ in streams]
    outputs = merged(streams)
    try:
        async for index, output in outputs:
            choices[index].add(output)
    finally:
        await outputs.aclose()
    return choices


async def _pump(index: int, stream: OutputStream, queue: asyncio.Queue[tuple[int, EngineOutput | BaseException | None]]) -> None:
    try:
        async for output in stream:
            await queue.put((index, output))
    except Exception as error:
        await queue.put((index, error))
    else:
        await queue.put((index, None))


def _checked(output: EngineOutput) -> EngineOutput:
    if output.finish_reason == "error":
        raise GenerationFailed(f"the engine could not finish this request: {output.error or 'unknown reason'}")
    if output.finish_reason == "abort":
        raise ServerDraining("the request was aborted, because the server is shutting down", hint="send it again to a running server")
    return output
