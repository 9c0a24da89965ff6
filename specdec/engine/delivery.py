"""Channel and Mailbox: outputs of the engine thread on their way to readers on event loops.

Owns: merging of what is not fetched yet, and the one wake-up per loop and step. Must not know: the engine.
Read next: engine/async_engine.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

from specdec.engine.types import EngineOutput
from specdec.errors import SpecdecError

MAX_PENDING = 16  # outputs kept apart before they are merged


class Mailbox:
    """Wakes the readers of one event loop. Wake-ups that pile up while the loop is busy become one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._woken: set[Channel] = set()

    def wake(self, channels: Iterable[Channel]) -> bool:
        """Schedule the readers of these channels; engine thread. False: the loop is closed."""
        with self._lock:
            is_scheduled = bool(self._woken)
            self._woken.update(channels)
        if is_scheduled:
            return True
        try:
            self._loop.call_soon_threadsafe(self._ring)
        except RuntimeError:  # the loop is closed
            with self._lock:
                self._woken.clear()
            return False
        return True

    def _ring(self) -> None:
        with self._lock:
            woken, self._woken = self._woken, set()
        for channel in woken:
            channel.event.set()


class Channel:
    """Outputs of one request between the engine thread (put, fail) and its one reader (get).

    keep_steps: never merge, because each output carries the drafts of its step.
    """

    def __init__(self, request_id: str, mailbox: Mailbox, *, keep_steps: bool) -> None:
        self.request_id = request_id
        self.mailbox = mailbox
        self.event = asyncio.Event()
        self._keep_steps = keep_steps
        self._lock = threading.Lock()
        self._pending: list[EngineOutput] = []
        self._error: SpecdecError | None = None
        self._is_over = False  # nothing more will be put
        self._is_closed = False  # nobody reads any more

    def put(self, output: EngineOutput) -> None:
        """Add a step's output; engine thread. The caller wakes the mailbox."""
        with self._lock:
            if self._is_closed or self._is_over:
                return
            self._pending.append(output)
            self._is_over = output.finish_reason is not None
            if len(self._pending) >= MAX_PENDING and not self._keep_steps:
                self._pending = [merge(self._pending)]

    def fail(self, error: SpecdecError) -> None:
        """End the stream with an error after what is pending; engine thread."""
        with self._lock:
            if not self._is_over:
                self._error = error
                self._is_over = True

    def close(self) -> bool:
        """Stop reading. True when the request had not ended, so that somebody should abort it."""
        with self._lock:
            needs_abort = not self._is_over and not self._is_closed
            self._is_closed = True
            self._pending = []
        return needs_abort

    async def get(self) -> EngineOutput | None:
        """Return all pending outputs as one, waiting for the first; None at the end.

        Raises:
            SpecdecError: the stream failed; again on every further call.
        """
        while True:
            self.event.clear()
            with self._lock:
                if self._pending and not self._is_closed:
                    return self._take()
                if self._error is not None:
                    raise self._error
                if self._is_over or self._is_closed:
                    return None
            await self.event.wait()

    def _take(self) -> EngineOutput:
        if self._keep_steps:
            return self._pending.pop(0)
        pending, self._pending = self._pending, []
        return merge(pending)


def merge(outputs: list[EngineOutput]) -> EngineOutput:
    """Return consecutive outputs of one request as one output. Traces of single steps are dropped unless there is one."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return first
    has_logprobs = any(output.logprobs is not None for output in outputs)
    return EngineOutput(
        request_id=first.request_id,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        logprobs=tuple(entry for output in outputs for entry in output.logprobs or ()) if has_logprobs else None,
        prompt_logprobs=first.prompt_logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        num_cached_tokens=first.num_cached_tokens,
        stats=last.stats,
        error=last.error,
    )
