"""Access: the outermost layer. Every request gets an id, is counted by route and status, and leaves a line at level DEBUG.

Owns: X-Request-Id and the HTTP counters. Must not know: what any route does. No body, query or key ever reaches the log.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

HEADER = "x-request-id"
CLIENT_CLOSED = 499  # nobody reads it; the access log of a proxy shows it
_SAFE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class HttpCounts(Collector):
    """Requests by route, method and status. Written and read on the event loop only."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def add(self, *, method: str, route: str, status: int) -> None:
        """Count one answered request."""
        self._counts[(method, route, str(status))] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the one family (called once per scrape)."""
        labels = ["model_name", "method", "route", "status"]
        text = "HTTP requests by route, method and status; 499: the client left first. A stream counts with the status that it began with."
        family = CounterMetricFamily("specdec_http_requests", text, labels=labels)
        for key, count in sorted(self._counts.items()):
            family.add_metric([self._model_name, *key], count)
        yield family


class Access:
    """Wraps the whole app (ASGI)."""

    def __init__(self, app: ASGIApp, *, counts: HttpCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get(HEADER, ""))
        status = CLIENT_CLOSED
        started_s = time.perf_counter()

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (HEADER.encode(), request_id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, tell)
        finally:
            route = _route(scope)
            self._counts.add(method=scope["method"], route=route, status=status)
            if logger.isEnabledFor(logging.DEBUG):
                elapsed_s = round(time.perf_counter() - started_s, 4)
                fields = {"request_id": request_id, "method": scope["method"], "route": route, "status": status, "duration_s": elapsed_s}
                logger.debug("%s %s %d in %.3f s, id %s", scope["method"], route, status, elapsed_s, request_id, extra={"fields": fields})


def _request_id(asked: str) -> str:
    """The client's id where it is harmless in logs and headers, else a new one."""
    return asked if _SAFE_ID.fullmatch(asked) else uuid.uuid4().hex


def _route(scope: Scope) -> str:
    """The route's template, never the path itself: clients could make labels without end."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "other"
