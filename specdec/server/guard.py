"""The layers in front of the routes: body size, API keys, and a last net under every error. Plain ASGI, so streams pass untouched.

Owns: who may come in and how large a body may be. Must not know: routes beyond their open paths.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.server.openai_errors import INVALID, ErrorReply, reply_for

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})  # probes and scrapers bring no key


class LastNet:
    """Answers what nothing below has answered: 500 without details, or silence where the answer has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def watch(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            reply = reply_for(error)
            if has_started:
                raise
            await reply.response()(scope, receive, send)


class BodyLimit:
    """Refuses bodies over `max_bytes` with 413, by their announced length or while they come in.

    timeout_s: a body that is not complete after so long gets 408; None: a client may take any time.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float | None = None) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isascii() and announced.isdigit() and int(announced) > self._max_bytes:
            await reply_for(self._too_large()).response()(scope, receive, send)
            return
        num_bytes = 0
        is_whole = self._timeout_s is None
        until_s = time.monotonic() + (self._timeout_s or 0.0)

        async def count() -> Message:
            nonlocal num_bytes, is_whole
            message = await (receive() if is_whole else self._in_time(receive, until_s))
            is_whole = is_whole or not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, count, send)

    async def _in_time(self, receive: Receive, until_s: float) -> Message:
        try:
            return await asyncio.wait_for(receive(), max(until_s - time.monotonic(), 0.0))
        except asyncio.TimeoutError:  # an alias of TimeoutError from Python 3.11 on
            text = f"the body was not complete after {self._timeout_s} s, the limit of this server (hint: send it again, or less)"
            raise HTTPException(408, text) from None

    def _too_large(self) -> HTTPException:
        text = f"the body is larger than {self._max_bytes} bytes, the limit of this server (hint: send less, or raise --max-body-bytes)"
        return HTTPException(413, text)


class ApiKeys:
    """Asks for a bearer key on all but the open paths, and names the tenant: equal keys share caches, others do not."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app = app
        self._open_paths = open_paths
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app (ASGI)."""
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not self._is_known(key.strip()):
            message = "the API key is missing or wrong (hint: send the header Authorization: Bearer KEY)"
            reply = ErrorReply(401, message, INVALID, None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
            await reply.response()(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = _digest(key.strip()).hex()[:16]
        await self._app(scope, receive, send)

    def _is_known(self, key: str) -> bool:
        """Compare digests of equal length, with every key, so that time tells nothing."""
        asked = _digest(key)
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(asked, digest)
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
