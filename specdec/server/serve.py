"""Running the app under uvicorn: bind first, serve, drain on SIGTERM or SIGINT, exit 0.

Owns: the signals and the drain. Must not know: routes, nor how sockets are bound (listen.py). Read next: app.py.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn
from fastapi import FastAPI

from specdec.server.listen import Tls, bind
from specdec.server.options import Lifecycle

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they close first and never write into a closed one
AFTER_DRAIN_S = 5  # streams that the drain limit ended need a moment to send their last event


def run_server(
    app: FastAPI,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    sock: socket.socket | None = None,
    drain_s: float = 30.0,
    tls: Tls | None = None,
) -> None:
    """Serve `app` until SIGTERM or SIGINT, then let running requests finish for at most `drain_s` seconds.

    Requests that outlast the drain get an error event (streams) or a 503. A second signal stops at once.

    Args:
        app: from `create_app`.
        sock: from `bind` or `bind_unix`; without it, `host` and `port` are bound here.

    Raises:
        ConfigError: the address cannot be used.
    """
    listener = sock or bind(host, port)
    with suppress(KeyboardInterrupt):
        asyncio.run(make_server(app, drain_s=drain_s, tls=tls).serve(sockets=[listener]))


def make_server(app: FastAPI, *, drain_s: float = 30.0, tls: Tls | None = None) -> DrainingServer:
    """Return the server that `run_server` runs; for embedding it in a loop of one's own."""
    limit_s = max(1, round(drain_s) + AFTER_DRAIN_S)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=limit_s,
        ssl_certfile=tls.certfile if tls else None,
        ssl_keyfile=tls.keyfile if tls else None,
    )
    return DrainingServer(config, lifecycle=app.state.lifecycle, drain_s=drain_s)


class DrainingServer(uvicorn.Server):
    """uvicorn with our drain: the routes hear of the signal, and the process ends with code 0."""

    def __init__(self, config: uvicorn.Config, *, lifecycle: Lifecycle, drain_s: float) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle
        self._drain_s = drain_s

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install the handlers without raising the signal again at the end, so that a clean stop exits with 0."""
        try:
            previous = {which: signal.signal(which, self.handle_exit) for which in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: the owner stops us through `should_exit`
            previous = {}
        try:
            yield
        finally:
            for which, handler in previous.items():
                signal.signal(which, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn calls it
        """Start the drain, or stop at once when asked a second time."""
        if self.should_exit:
            self.force_exit = True
            return
        self._lifecycle.draining = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, wait for running requests, end the rest when the limit passes."""
        self._lifecycle.draining = True
        logger.info("shutting down: running requests may finish within %.0f s", self._drain_s)
        timer = asyncio.get_running_loop().call_later(self._drain_s, self._lifecycle.expired.set)
        try:
            await super().shutdown(sockets=sockets)
        finally:
            timer.cancel()
