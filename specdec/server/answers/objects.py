"""ObjectEnd and CallObject: one JSON object in a text that is still being written.

Owns: where an object ends, and which part of it is the arguments of a call. Must not know: what stands around it (calls.py).

Every character is looked at once, however the text is cut, so a stream costs what the whole text costs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class Call:
    """A complete call: arguments are the JSON text of an object."""

    name: str
    arguments: str


class ObjectEnd:
    """Finds the end of the object (or list) that a growing text begins with."""

    def __init__(self) -> None:
        self._position = 0  # characters looked at
        self._end: int | None = None
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Return the index behind the object, None while it is open. `text` is the same as at the last call, or longer."""
        if self._end is not None:
            return self._end
        for index in range(self._position, len(text)):
            char = text[index]
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._end = index + 1
                    return self._end
        self._position = len(text)
        return None


def call_of(text: str) -> Call | None:
    """Return the call that a JSON text spells, None when it is none: no JSON, no name, or no arguments that could be an object."""
    return _call(_loaded(text))


def calls_of_list(text: str) -> list[Call] | None:
    """Return the calls of a JSON list (or of one object), None where there are none or one of them is no call."""
    value = _loaded(text)
    calls = [_call(entry) for entry in (value if isinstance(value, list) else [value])]
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict):
        return None
    key = next((key for key in ARGUMENT_KEYS if key in value), None)
    name = value.get("name")
    arguments = arguments_text(value[key]) if key else None
    if not isinstance(name, str) or not name or not _is_unicode(name) or arguments is None:
        return None
    return Call(name, arguments)


def arguments_text(value: Any) -> str | None:
    """Return arguments as JSON text: of an object, of an object as text (some models quote it), or {} for null; else None."""
    if isinstance(value, str):
        value = _loaded(value)
    value = {} if value is None else value
    if not isinstance(value, dict):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return None
    return text if _is_unicode(text) else json.dumps(value)  # half of a surrogate pair can only travel escaped


def _loaded(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return ...


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _is_unicode(text: str) -> bool:
    return not any(0xD800 <= ord(char) < 0xE000 for char in text)
