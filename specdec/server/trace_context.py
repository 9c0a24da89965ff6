"""The caller's trace: the W3C header `traceparent` of the request that is being answered, for whoever makes engine requests of it.

Owns: one context variable. Must not know: OpenTelemetry. A plain ASGI layer, added only where traces are exported.
"""

from __future__ import annotations

import re
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

_FORM = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_parent: ContextVar[str] = ContextVar("traceparent", default="")


def trace_parent() -> str:
    """The header of the running request, "" where there is none or traces are not exported."""
    return _parent.get()


class TraceContext:
    """Keeps the header while the app runs (ASGI)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app."""
        if scope["type"] == "http":
            header = Headers(scope=scope).get("traceparent", "").strip()
            _parent.set(header if len(header) <= 256 and _FORM.fullmatch(header) else "")
        await self._app(scope, receive, send)
