"""Logging: one formatter for the whole package, text or JSON, and warnings that are said once.

Owns: format and level. Must not know: who logs. Nothing is installed on import; `configure` is called by entry points.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Literal

from specdec.errors import ConfigError

ROOT = "specdec"
GUESTS = ("uvicorn", "asyncio", "py.warnings")  # their warnings leave through our handler, in the same format
LEVEL_VARIABLE = "SPECDEC_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_said: set[str] = set()


class _TextFormatter(logging.Formatter):
    """`2026-01-31 10:20:30 INFO config.resolve: message`, local time, package prefix dropped."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{stamp} {record.levelname} {record.name.removeprefix(ROOT + '.')}: {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(logging.Formatter):
    """One JSON object a line: time (seconds since the epoch), level, logger, message, and exception when there is one.

    What a caller passes as `extra={"fields": {...}}` becomes members of the object.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = {"time": round(record.created, 3), "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; call it with `__name__`."""
    return logging.getLogger(name)


def configure(level: str | None = None, fmt: Literal["text", "json"] = "text") -> None:
    """Send the package's log lines to stderr. Calling it again replaces what the first call installed.

    level: one of LEVELS in any case; None reads SPECDEC_LOG_LEVEL, and INFO without it.

    Raises:
        ConfigError: the level or the format is not known.
    """
    name, origin = (level, "log level") if level is not None else (os.environ.get(LEVEL_VARIABLE) or "INFO", LEVEL_VARIABLE)
    if name.upper() not in LEVELS:
        raise ConfigError(f"{origin} is {name!r}, but it must be one of {', '.join(LEVELS)}", hint="INFO is the default")
    if fmt not in ("text", "json"):
        raise ConfigError(f"log format is {fmt!r}, but it must be text or json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if fmt == "json" else _TextFormatter())
    for top, least in ((ROOT, name.upper()), *((other, "WARNING") for other in GUESTS)):
        root = logging.getLogger(top)
        root.handlers = [handler]
        root.setLevel(least)
        root.propagate = False


def warn_once(logger: logging.Logger, message: str, *args: object) -> None:
    """Log a warning the first time this formatted text is seen in the process."""
    text = message % args if args else message
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)
