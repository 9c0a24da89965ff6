"""The errors specdec raises on purpose. Each names the field, the value, the rule, and the way out.

Owns: the exception hierarchy. Must not know: who raises or renders them (cli prints, server maps to HTTP).
"""

from __future__ import annotations


class SpecdecError(Exception):
    """Base of every error a user may see. `hint` is the way out, printed on its own line."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def render(self) -> str:
        """Return the message and, on a second line, the hint."""
        return f"error: {self.message}" + (f"\nhint: {self.hint}" if self.hint else "")


class ConfigError(SpecdecError):
    """Bad configuration: stops the start with exit code 2 and no traceback."""


class RequestRejected(SpecdecError):
    """A request that cannot be served exactly as asked: HTTP 400. `param` is the body field at fault."""

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class QueueFull(SpecdecError):
    """The waiting queue is at its limit: HTTP 429 with Retry-After `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: int = 1, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class EngineAsleep(SpecdecError):
    """The engine sleeps or changes its weights: HTTP 503 with Retry-After. Requests are taken again when it is awake."""


class EngineDeadError(SpecdecError):
    """The engine core stopped and cannot serve: HTTP 503, and /health turns red."""
