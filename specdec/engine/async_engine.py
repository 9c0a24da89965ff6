"""AsyncEngine: the engine core on its own thread, and one asyncio stream of outputs per request.

Owns: the thread, the inbox, delivery to event loops, back-pressure, abort on disconnect, shutdown.
Must not know: HTTP, scheduling. Read next: server/routes.py.

The core thread never waits for a reader and wakes an event loop at most once per step, whatever the batch size; what
a slow reader has not fetched is merged, so that it gets fewer and larger outputs and memory stays bounded by text.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from specdec.engine.admission import with_bad_word_ids
from specdec.engine.core import EngineCore
from specdec.engine.delivery import Channel, Mailbox
from specdec.engine.orders import Order, PauseMode, asleep
from specdec.engine.possible import check_possible
from specdec.engine.types import EngineOutput, EngineRequest
from specdec.errors import EngineDeadError, QueueFull, RequestRejected, SpecdecError
from specdec.metrics.stats import EngineStats
from specdec.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

JOIN_GRACE_S = 10.0  # after the drain a step may still be running; a hung one must not hang the exit


class OutputStream:
    """Async iterator over one request's outputs. Closing it, dropping it, or cancelling its reader aborts the request."""

    def __init__(self, engine: AsyncEngine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel

    @property
    def request_id(self) -> str:
        """Id of the request that is read."""
        return self._channel.request_id

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> EngineOutput:
        """Return everything since the last call as one output (drafts in detail: one output per step).

        Raises:
            SpecdecError: the request was refused by the scheduler, or the engine died.
        """
        try:
            output = await self._channel.get()
        except asyncio.CancelledError:
            self.close()
            raise
        if output is None:
            raise StopAsyncIteration
        return output

    async def aclose(self) -> None:
        """Abort the request unless it is finished."""
        self.close()

    def close(self) -> None:
        """Abort the request unless it is finished; safe from any thread, and more than once."""
        if self._channel.close():
            self._engine.abort(self._channel.request_id)

    def __del__(self) -> None:
        self.close()


class AsyncEngine:
    """Serves many asyncio clients with one EngineCore. All methods are safe from any thread."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._max_waiting = core.resolved.engine.scheduler.max_waiting
        self._condition = threading.Condition()  # guards everything below
        self._new: list[tuple[EngineRequest, Channel]] = []
        self._aborts: list[str] = []
        self._channels: dict[str, Channel] = {}
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._drain_until_s: float | None = None  # set once by shutdown
        self._order: Order | None = None  # from when it is given until it is done; nothing new is taken meanwhile
        self._error: EngineDeadError | None = None
        self._busy_since_s: float | None = None  # start of the running wait for a step; None while idle
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)
        self._thread.start()

    # -- what clients call -------------------------------------------------------------------------------------------

    async def with_grammar(self, sampling: SamplingParams, *, field: str) -> SamplingParams:
        """Return the parameters with their constraint, if any, compiled on another thread. Call it before `generate`.

        Raises:
            RequestRejected: the constraint cannot be used (`field` is the `param` and begins the message), or it and other
                parameters leave no token to draw.
            QueueFull: too many constraints are being compiled.
        """
        wish = sampling.structured
        if wish is not None and wish.compiled is None:
            compiled = await self.core.grammars.compile_async(wish, field=field)
            sampling = replace(sampling, structured=replace(wish, compiled=compiled))
        if sampling.allowed_token_ids is not None or sampling.bad_words:
            await asyncio.to_thread(self._check_possible, sampling, field)
        return sampling

    def _check_possible(self, sampling: SamplingParams, field: str) -> None:
        resolved = self.core.resolved
        known = with_bad_word_ids(sampling, self.core.tokenizer)
        check_possible(known, vocab_size=resolved.vocab_size, eos_token_ids=resolved.eos_token_ids, field=field)

    def generate(self, request: EngineRequest) -> OutputStream:
        """Queue a request and return its stream. Call it on the event loop that will read.

        A constraint that `with_grammar` has not compiled is compiled by the engine's thread, which holds up every request.

        Raises:
            RequestRejected: the request cannot be served as asked, or its id is in use.
            QueueFull: as many requests wait as the server allows.
            EngineAsleep: the engine sleeps or changes its weights.
            EngineDeadError: the engine died or is shutting down.
        """
        self.core.check(request)
        loop = asyncio.get_running_loop()
        with self._condition:
            self._require_alive()
            if self._order is not None or self.core.is_sleeping:
                raise asleep()
            if request.request_id in self._channels:
                raise RequestRejected(f"request_id {request.request_id!r} is in use", param="request_id", hint="send another id, or none")
            num_waiting = self.core.num_waiting + len(self._new)
            if self._max_waiting and num_waiting >= self._max_waiting:
                message = f"{num_waiting} requests wait already, the limit is {self._max_waiting}"
                raise QueueFull(message, hint="retry later, or raise --max-waiting")
            channel = Channel(request.request_id, self._mailbox(loop), keep_steps=request.track_drafts)
            self._channels[request.request_id] = channel
            self._new.append((request, channel))
            self._condition.notify()
        return OutputStream(self, channel)

    def abort(self, request_id: str) -> None:
        """Stop a request: its stream ends with finish_reason "abort". Unknown ids are ignored: it may just have ended."""
        with self._condition:
            if request_id in self._channels:
                self._aborts.append(request_id)
                self._condition.notify()

    async def sleep(self, *, level: int = 1, mode: PauseMode = "abort") -> None:
        """Give memory back, see EngineCore.sleep. Running requests end with EngineAsleep, or (mode "wait") come to their end first.

        Raises:
            RequestRejected: the level does not exist, or another order is being carried out.
        """
        await self._give(Order(work=lambda: self.core.sleep(level), mode=mode))

    async def wake_up(self) -> None:
        """Take requests again, see EngineCore.wake_up."""
        await self._give(Order(work=self.core.wake_up, mode="wait"))

    async def reload_weights(
        self, weights_path: str | None = None, draft_weights_path: str | None = None, *, mode: PauseMode = "abort"
    ) -> None:
        """Read weights again and wake up, see EngineCore.reload_weights; running requests as in `sleep`."""
        await self._give(Order(work=lambda: self.core.reload_weights(weights_path, draft_weights_path), mode=mode))

    async def _give(self, order: Order) -> None:
        with self._condition:
            self._require_alive()
            if self._order is not None:
                raise RequestRejected("the engine carries out another order", hint="wait until sleep, wake_up or reload_weights is done")
            self._order = order
            self._condition.notify()
        await asyncio.shield(asyncio.wrap_future(order.done))  # who leaves does not stop it half-way

    async def shutdown(self, *, drain_s: float = 30.0) -> None:
        """Refuse new requests, let running ones end within `drain_s` seconds, abort the rest, stop the thread."""
        await asyncio.get_running_loop().run_in_executor(None, self.close, drain_s)

    def close(self, drain_s: float = 0.0) -> None:
        """Blocking form of `shutdown`."""
        with self._condition:
            if self._drain_until_s is None:
                self._drain_until_s = time.monotonic() + drain_s
            self._condition.notify()
        self._thread.join(drain_s + JOIN_GRACE_S)
        if self._thread.is_alive():
            logger.error("the engine thread hangs in a step and is left behind: %s", self.describe_requests())
            self._die(EngineDeadError("the engine did not finish its step at shutdown"))
            return
        self.core.close()

    # -- what health checks and metrics read -------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """False once the engine died or was shut down."""
        return self._error is None and self._thread.is_alive()

    @property
    def is_sleeping(self) -> bool:
        """True while weights or caches are given back."""
        return self.core.is_sleeping

    @property
    def takes_requests(self) -> bool:
        """False while the engine sleeps, or is about to."""
        return self._order is None and not self.core.is_sleeping

    @property
    def capacity(self) -> int:
        """Requests the engine holds at most, running and waiting; 0 means no limit."""
        limits = self.core.resolved.engine.scheduler
        return limits.max_num_seqs + limits.max_waiting if limits.max_waiting else 0

    @property
    def error(self) -> EngineDeadError | None:
        """Why the engine is dead, None while it lives."""
        return self._error

    @property
    def last_step_age_s(self) -> float:
        """Seconds since the newest step ended while work waits; 0.0 while idle. Grows without bound when a step hangs."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    @property
    def stats(self) -> EngineStats:
        """A consistent copy of all counters."""
        return self.core.stats.snapshot()

    @property
    def num_unfinished(self) -> int:
        """Requests that were taken and have not ended."""
        return len(self._channels)

    def describe_requests(self) -> dict[str, dict[str, Any]]:
        """State of every request, for the watchdog's report when a step hangs."""
        return self.core.describe_requests()

    # -- the engine thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._obey()
                if self.core.has_work:
                    self._deliver(self.core.step())
                    self._busy_since_s = time.monotonic()
            self._abort_all()
            if self._order is not None:
                self._order.end(EngineDeadError("the server is shutting down"))
        except BaseException as error:  # whatever ends this thread, no reader may wait for it
            logger.critical("the engine died in a step; requests: %s", self.core.describe_requests(), exc_info=True)
            message = f"the engine died: {type(error).__name__}: {error}"
            self._die(EngineDeadError(message, hint="the server log has the traceback; restart the server"))

    def _take_commands(self) -> bool:
        """Apply what arrived, sleeping while there is nothing to do. False: it is time to stop."""
        with self._condition:
            while not self._new and not self._aborts and self._order is None and not self.core.has_work:
                self._busy_since_s = None
                if self._drain_until_s is not None:
                    return False
                self._condition.wait()
            if self._busy_since_s is None:
                self._busy_since_s = time.monotonic()
            new, self._new = self._new, []
            aborts, self._aborts = self._aborts, []
            drain_until_s = self._drain_until_s
        for request, channel in new:
            try:
                self.core.add_request(request)
            except SpecdecError as error:
                self._end(channel, error)
        self._deliver(output for request_id in aborts if (output := self.core.abort(request_id)) is not None)
        return drain_until_s is None or time.monotonic() < drain_until_s

    def _obey(self) -> None:
        """Carry out the order that waits, as soon as no request runs."""
        order = self._order
        if order is None:
            return
        if order.mode == "abort":
            for request_id, channel in list(self._channels.items()):
                self.core.abort(request_id)
                self._end(channel, asleep())
        if self._channels:
            return
        self._busy_since_s = None  # reading weights may take longer than any step
        error = order.run()
        with self._condition:
            self._order = None
        order.end(error)

    def _deliver(self, outputs: Iterable[EngineOutput]) -> None:
        """Hand a step's outputs to their streams: one wake-up for each event loop."""
        by_mailbox: dict[Mailbox, list[Channel]] = {}
        for output in outputs:
            channel = self._channels.get(output.request_id)
            if channel is None:
                continue
            channel.put(output)
            by_mailbox.setdefault(channel.mailbox, []).append(channel)
            if output.finish_reason is not None:
                with self._condition:
                    del self._channels[output.request_id]
        for mailbox, channels in by_mailbox.items():
            if not mailbox.wake(channels):  # the loop is closed: nobody will ever read
                for channel in channels:
                    channel.close()
                    self.abort(channel.request_id)

    def _end(self, channel: Channel, error: SpecdecError) -> None:
        with self._condition:
            self._channels.pop(channel.request_id, None)
        channel.fail(error)
        channel.mailbox.wake([channel])

    def _abort_all(self) -> None:
        outputs = [self.core.abort(request_id) for request_id in list(self._channels)]
        self._deliver(output for output in outputs if output is not None)

    def _die(self, error: EngineDeadError) -> None:
        with self._condition:
            self._error = self._error or error
            channels = list(self._channels.values())
        if self._order is not None:
            self._order.end(EngineDeadError(error.message, hint=error.hint))
        for channel in channels:
            self._end(channel, EngineDeadError(error.message, hint=error.hint))  # one each: readers raise them at the same time
        self._busy_since_s = None

    def _require_alive(self) -> None:
        if self._error is not None:
            raise EngineDeadError(self._error.message, hint=self._error.hint)
        if self._drain_until_s is not None:
            raise EngineDeadError("the server is shutting down and takes no new requests")

    def _mailbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        if loop not in self._mailboxes:
            self._mailboxes = {known: box for known, box in self._mailboxes.items() if not known.is_closed()}
            self._mailboxes[loop] = Mailbox(loop)
        return self._mailboxes[loop]
