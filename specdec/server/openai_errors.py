"""OpenAI error bodies: every failure leaves the server as {"error": {message, type, param, code}}.

Owns: the mapping from exceptions to status, body and headers. Must not know: routes. Read next: routes.py.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from specdec.errors import EngineAsleep, EngineDeadError, QueueFull, RequestRejected, SpecdecError

logger = logging.getLogger(__name__)

INVALID = "invalid_request_error"


class ContextLengthExceeded(RequestRejected):
    """Prompt and requested tokens do not fit the model's context."""


class ModelNotFound(SpecdecError):
    """The body names a model that is not served here: HTTP 404."""


class ResponseNotStored(SpecdecError):
    """The client asks for a response that it got earlier: HTTP 404."""


class ServerDraining(SpecdecError):
    """The server is shutting down and ended this request: HTTP 503."""


class RequestTimedOut(SpecdecError):
    """An answer took longer than this server allows: HTTP 504."""


class GenerationFailed(SpecdecError):
    """The engine gave this one request up (for example no finite logit): HTTP 500, the server goes on."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """One error as it goes over the wire."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the OpenAI error object. Names a client sent may hold lone surrogates, which no encoding of the answer could carry."""
        message, param = (text and text.encode(errors="replace").decode() for text in (self.message, self.param))
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the error as a whole HTTP response."""
        return JSONResponse(self.body(), status_code=self.status, headers=dict(self.headers))

    def event(self) -> bytes:
        """Return the error as one SSE event, for a stream that has begun."""
        return b"data: " + json.dumps(self.body(), ensure_ascii=False).encode() + b"\n\n"


def reply_for(error: Exception) -> ErrorReply:
    """Map an exception to its reply. Anything not raised on purpose is logged in full and answered without details."""
    match error:
        case ContextLengthExceeded():
            return ErrorReply(400, _text(error), INVALID, error.param, "context_length_exceeded")
        case RequestRejected():
            return ErrorReply(400, _text(error), INVALID, error.param)
        case ModelNotFound():
            return ErrorReply(404, _text(error), INVALID, "model", "model_not_found")
        case ResponseNotStored():
            return ErrorReply(404, _text(error), INVALID, "response_id", "response_not_found")
        case QueueFull():
            return ErrorReply(429, _text(error), "rate_limit_error", None, "queue_full", {"Retry-After": str(error.retry_after_s)})
        case EngineAsleep():
            return ErrorReply(503, _text(error), "server_error", None, "asleep", {"Retry-After": "5"})
        case EngineDeadError():
            return ErrorReply(503, _text(error), "server_error", None, "engine_dead")
        case ServerDraining():
            return ErrorReply(503, _text(error), "server_error", None, "shutting_down", {"Retry-After": "5"})
        case RequestTimedOut():
            return ErrorReply(504, _text(error), "server_error", None, "request_timeout")
        case GenerationFailed():
            return ErrorReply(500, _text(error), "server_error", None, "generation_failed")
        case RequestValidationError():
            return _validation_reply(error)
        case HTTPException():
            return _http_reply(error)
    logger.error("unexpected error while serving a request", exc_info=error)
    return ErrorReply(500, "internal server error; the server's log has the details", "server_error", None, "internal_error")


def install(app: FastAPI) -> None:
    """Route every error of `app` through `reply_for`."""

    async def handle(_request: Request, error: Exception) -> JSONResponse:
        return reply_for(error).response()

    for kind in (SpecdecError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)


def _text(error: SpecdecError) -> str:
    """One line: a client prints the message as it is."""
    return error.message + (f" (hint: {error.hint})" if error.hint else "")


def _validation_reply(error: RequestValidationError) -> ErrorReply:
    """Join pydantic's findings in one line; `param` is the first field at fault."""
    parts: list[str] = []
    param: str | None = None
    for found in error.errors():
        path = ".".join(str(part) for part in found["loc"][1:] if not _is_branch(str(part)))
        if found["type"] == "json_invalid":
            reason = found.get("ctx", {}).get("error", "")
            return ErrorReply(400, f"the body is not valid JSON: {reason} at character {found['loc'][-1]}", INVALID, None, "invalid_json")
        if not path:
            rule = "the body must be a JSON object, sent with content-type application/json"
            return ErrorReply(400, rule, INVALID, None, "invalid_body")
        param = param or path
        parts.append(_finding(path, found))
    return ErrorReply(400, "; ".join(dict.fromkeys(parts)), INVALID, param)


def _finding(path: str, found: Mapping[str, Any]) -> str:
    if found["type"] == "missing":
        return f"{path} is missing, but it is required"
    if found["type"] == "value_error":  # our own validators already say field, value and rule
        return str(found["msg"]).removeprefix("Value error, ")
    value = repr(found.get("input"))
    shown = value if len(value) <= 80 else value[:77] + "..."
    if found["type"] == "too_short" and isinstance(found.get("ctx"), dict):
        return f"{path} is {shown}, but it must hold at least {found['ctx']['min_length']} item"
    return f"{path} is {shown}, but {_rule(str(found['msg']))}"


def _rule(message: str) -> str:
    return message.replace("Input should be", "it must be") if message.startswith("Input should be") else message[:1].lower() + message[1:]


def _unreadable(cause: BaseException | None) -> str:
    """What the JSON reader stumbled over beside plain bad syntax, which has a reply of its own."""
    match cause:
        case UnicodeDecodeError():
            return f"it is not UTF-8 at byte {cause.start}"
        case RecursionError():
            return "its lists and objects are nested too deeply"
        case ValueError():  # the only other one that the reader raises: int() refuses such texts
            return f"it holds an integer of more than {sys.get_int_max_str_digits()} digits; no field takes one so large"
    return "it must be JSON text in UTF-8"


def _is_branch(part: str) -> bool:
    """True for the names that pydantic gives to arms of a union, which mean nothing to a client."""
    return "[" in part or part in ("str", "int", "float", "bool")


def _http_reply(error: HTTPException) -> ErrorReply:
    codes = {
        401: "invalid_api_key",
        404: "not_found",
        405: "method_not_allowed",
        408: "body_timeout",
        413: "body_too_large",
        400: "invalid_body",
    }
    texts = {
        404: "no such route; GET /openapi.json lists the routes",
        405: "this route does not take this HTTP method; see the Allow header",
    }
    if error.status_code == 400 and error.detail == "There was an error parsing the body":
        return ErrorReply(400, f"the body could not be read: {_unreadable(error.__cause__)}", INVALID, None, "invalid_body")
    default = error.detail in ("Not Found", "Method Not Allowed")
    message = texts.get(error.status_code, str(error.detail)) if default else str(error.detail)
    kind = INVALID if error.status_code < 500 else "server_error"
    return ErrorReply(error.status_code, message, kind, None, codes.get(error.status_code), dict(error.headers or {}))
