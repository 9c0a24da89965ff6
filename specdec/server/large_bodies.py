"""LargeBodyRoute: bodies over a size are read beside the event loop, so that streams and probes of others go on.

Owns: where JSON is parsed and checked. Must not know: what the bodies mean. Read next: protocol.py.
"""

from __future__ import annotations

import asyncio
import json
import json.scanner
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

LARGE_BYTES = 256 * 1024  # below it, reading takes some 30 ms at worst, which is a decode step
_READER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="body")  # one at a time: two would halve the event loop's share again


class UnhurriedDecoder(json.JSONDecoder):
    """json's decoder with the scanner that is written in Python: the one in C lets no other thread run before it is done."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


class LargeBodyRoute(APIRoute):
    """A route whose body, if it is large, comes to FastAPI parsed and checked. Replies are those that FastAPI itself would give."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler."""
        handle, field = super().get_route_handler(), self.body_field

        async def read_and_handle(request: Request) -> Response:
            if field is not None and _is_json(request) and len(raw := await request.body()) > LARGE_BYTES:
                value = await asyncio.get_running_loop().run_in_executor(_READER, _read, raw, field)
                request = _ReadRequest(request, raw, value)
            return await handle(request)

        return read_and_handle


class _ReadRequest(Request):
    """A request whose body was read before; json() gives the finished model, which FastAPI takes as it is."""

    def __init__(self, request: Request, raw: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._raw = raw
        self._value = value

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._value


def _is_json(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


def _read(raw: bytes, field: Any) -> Any:
    """Return the body as a model.

    Raises:
        RequestValidationError: it is no JSON, or not what the route takes.
        HTTPException: it is no text, too deep, or holds a number that is too long.
        RequestRejected: a field has no meaning here.
    """
    try:
        given = json.loads(raw, cls=UnhurriedDecoder)
    except json.JSONDecodeError as error:
        found = {"type": "json_invalid", "loc": ("body", error.pos), "msg": error.msg, "input": {}, "ctx": {"error": error.msg}}
        raise RequestValidationError([found]) from error
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "There was an error parsing the body") from error
    value, faults = field.validate(given, {}, loc=("body",))
    if faults:
        raise RequestValidationError(faults)
    return value
