"""Server-sent events: one response class that streams, notices a client that left, and ends cleanly on shutdown.

Owns: event framing and the race between producer, client and drain limit. Must not know: what the events say.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from specdec.server.openai_errors import RequestTimedOut, ServerDraining, reply_for
from specdec.server.options import Lifecycle

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the second keeps nginx from holding tokens back
DRAIN_MESSAGE = "the server is shutting down and its drain limit has passed"

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


def encode(value: object) -> str:
    """Return `value` as compact JSON text, non-ASCII characters as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def event(value: object) -> bytes:
    """Return `value` as one SSE event."""
    return f"data: {encode(value)}\n\n".encode()


class EventStream(StreamingResponse):
    """Streams events until the source ends, the client leaves, or a limit passes: of the drain, or of one request (`timeout_s`).

    The status line waits for the first event, so an error before it is an ordinary error response.
    However it ends, `events` is closed, which aborts the requests behind it. done: what follows the last event.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, lifecycle: Lifecycle, timeout_s: float | None = None, done: bytes = DONE
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers=HEADERS)
        self._events = events
        self._lifecycle = lifecycle
        self._timeout_s = timeout_s
        self._done = done
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Run the response (ASGI)."""
        try:
            await race(self._send_all(send), receive, self._lifecycle, timeout_s=self._timeout_s)
        except ClientGone:
            return
        except Exception as error:
            if not self._has_started:
                raise
            await send({"type": "http.response.body", "body": reply_for(error).event() + self._done, "more_body": False})

    async def _send_all(self, send: Send) -> None:
        try:
            async for data in self._events:
                if not self._has_started:
                    self._has_started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": self._done, "more_body": False})
        finally:
            await self._events.aclose()


async def until_client_leaves(work: Coroutine[Any, Any, T], request: Request, *, lifecycle: Lifecycle, timeout_s: float | None = None) -> T:
    """Await `work` for a request whose body has been read.

    Raises:
        ClientGone: the client left first; `work` was cancelled.
        ServerDraining: the drain limit passed first; `work` was cancelled.
        RequestTimedOut: `timeout_s` seconds passed first; `work` was cancelled.
    """
    return await race(work, request.receive, lifecycle, timeout_s=timeout_s)


async def race(work: Coroutine[Any, Any, T], receive: Receive, lifecycle: Lifecycle, *, timeout_s: float | None = None) -> T:
    """Await `work` unless the client leaves or a limit passes first; see `until_client_leaves`."""
    producer = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    expired = asyncio.ensure_future(lifecycle.expired.wait())
    try:
        await asyncio.wait((producer, gone, expired), return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
        if producer.done():
            return producer.result()
        if expired.done():
            raise ServerDraining(DRAIN_MESSAGE, hint="send the request again to a running server")
        if gone.done():
            raise ClientGone
        raise RequestTimedOut(f"the answer was not complete after {timeout_s} s, the limit of this server", hint="ask for fewer tokens")
    finally:
        for task in (producer, gone, expired):
            task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await asyncio.gather(producer, gone, expired, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
