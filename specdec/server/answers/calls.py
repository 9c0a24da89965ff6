"""Readers of tool calls: each turns a growing text into content and calls, in the format of one family of models.

Owns: Hermes and Qwen, Llama 3, Mistral, and the list that a grammar makes. Must not know: HTTP, tokens, reasoning.
Read next: objects.py.

A call in free text is shown once it is complete and valid JSON; what turns out to be no call is shown as the text it was. So
what a client gets does not depend on how the text was cut. A grammar makes nothing else than calls, so those are shown as they grow.
"""

from __future__ import annotations

import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable

from specdec.server.answers.objects import Call, ObjectEnd, call_of, calls_of_list
from specdec.server.answers.pieces import CallArguments, CallStart, Content, Piece

ALPHANUMERIC = string.ascii_letters + string.digits


class CallReader(ABC):
    """Reads one answer. The pieces of `feed`, then those of `finish`, joined, are the answer.

    tool_names: the tools of the request. is_parallel False: calls after the first are left out.
    """

    marker = ""  # what opens calls, where that may be one special token, which decoding would leave out

    def __init__(self, tool_names: Collection[str], *, is_parallel: bool = True) -> None:
        self.num_calls = 0
        self._tool_names = tool_names
        self._is_parallel = is_parallel
        self._text = ""  # what was fed and not yet shown
        self._space = ""  # white space behind shown content, which is dropped in front of a call

    def feed(self, text: str) -> list[Piece]:
        """Add text and return what is known by now."""
        self._text += text
        return list(self._read())

    def finish(self) -> list[Piece]:
        """Return the rest: the text ends here, so what is still open was no call."""
        pieces = [*self._rest()]
        rest, self._text, self._space = self._space + self._text, "", ""
        return [*pieces, Content(rest)] if rest else pieces

    @abstractmethod
    def _read(self) -> Iterable[Piece]:
        """Take from `_text` what is decided."""

    def _rest(self) -> Iterable[Piece]:
        """What the end of the text decides."""
        return ()

    def _content(self, text: str) -> Iterable[Piece]:
        """Show text, its white space at the end only once more text follows."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            yield Content(shown)

    def _call(self, call: Call) -> Iterable[Piece]:
        self._space = ""
        if self.num_calls and not self._is_parallel:
            return
        index, self.num_calls = self.num_calls, self.num_calls + 1
        yield CallStart(index, self._new_id(), call.name)
        yield CallArguments(index, call.arguments)

    def _new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"


class _Marked(CallReader):
    """Calls that stand behind a marker, in the middle of text."""

    def __init__(self, tool_names: Collection[str], *, is_parallel: bool = True) -> None:
        super().__init__(tool_names, is_parallel=is_parallel)
        self._is_open = False  # the text begins with the marker
        self._scan = ObjectEnd()

    def _read(self) -> Iterable[Piece]:
        while self._text:
            if not self._is_open:
                before, has_marker, behind = self._text.partition(self.marker)
                num_held = 0 if has_marker else _num_held(before, self.marker)
                self._text = self.marker + behind if has_marker else before[len(before) - num_held :]
                yield from self._content(before if has_marker else before[: len(before) - num_held])
                self._is_open = bool(has_marker)
                if not has_marker:
                    return
            behind = self._text[len(self.marker) :]
            taken = self._take(behind)
            if taken is None:
                return
            calls, length = taken
            if calls:
                for call in calls:
                    yield from self._call(call)
            else:  # no call after all: the marker is text
                length = 0
                yield from self._content(self.marker)
            self._text, self._is_open, self._scan = behind[length:], False, ObjectEnd()

    @abstractmethod
    def _take(self, text: str) -> tuple[list[Call], int] | None:
        """Return calls behind the marker and their length, no calls where there are none, None while that is open."""


class Hermes(_Marked):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, once for each call: Hermes, Qwen 2.5, Qwen 3 and others."""

    marker = "<tool_call>"
    END = "</tool_call>"

    def _take(self, text: str) -> tuple[list[Call], int] | None:
        body = text.lstrip()
        if not body:
            return None
        if body[0] != "{":
            return [], 0
        end = self._scan.find(body)
        if end is None:
            return None
        call = call_of(body[:end])
        if call is None:
            return [], 0
        behind = body[end:].lstrip()
        if self.END.startswith(behind) and behind != self.END:
            return None  # the closing tag, or a part of it, is still to come
        length = len(body) - len(behind) + len(self.END) if behind.startswith(self.END) else end
        return [call], len(text) - len(body) + length

    def _rest(self) -> Iterable[Piece]:
        """A call without its closing tag is whole all the same."""
        if not self._is_open:
            return
        body = self._text[len(self.marker) :].lstrip()
        end = ObjectEnd().find(body)
        call = call_of(body[:end]) if end is not None and body.startswith("{") else None
        if call is not None:
            self._text = ""
            yield from self._call(call)


class Mistral(_Marked):
    """[TOOL_CALLS] and a list of objects, or, in newer models, name{...} behind a marker of its own for each call."""

    marker = "[TOOL_CALLS]"
    _NAMED = re.compile(r"\s*([\w.-]+)\s*(\[CALL_ID\][\w-]*\s*)?(\[ARGS\])?\s*(?=\{)")
    _MAY_BE_NAMED = re.compile(r"[\s\w.\[\]-]{0,256}")

    def _take(self, text: str) -> tuple[list[Call], int] | None:
        body = text.lstrip()
        if not body:
            return None
        start = len(text) - len(body)
        if body[0] in "[{":
            return self._list(body, start)
        named = self._NAMED.match(text)
        if named is None:
            return None if self._MAY_BE_NAMED.fullmatch(text) else ([], 0)
        end = self._scan.find(text[named.end() :])
        if end is None:
            return None
        call = call_of(f'{{"name": "{named[1]}", "arguments": {text[named.end() : named.end() + end]}}}')
        return ([], 0) if call is None else ([call], named.end() + end)

    def _list(self, body: str, start: int) -> tuple[list[Call], int] | None:
        end = self._scan.find(body)
        if end is None:
            return None
        calls = calls_of_list(body[:end])
        return ([], 0) if calls is None else (calls, start + end)

    def _new_id(self) -> str:
        return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))  # its templates take no other


class Llama3(CallReader):
    """The whole answer is calls, or none of it: {"name": ..., "parameters": {...}}, with ; between several."""

    marker = "<|python_tag|>"

    def __init__(self, tool_names: Collection[str], *, is_parallel: bool = True) -> None:
        super().__init__(tool_names, is_parallel=is_parallel)
        self._is_content = False
        self._scan = ObjectEnd()

    def _read(self) -> Iterable[Piece]:
        while self._text and not self._is_content:
            body = self._text.lstrip(" \t\r\n;," if self.num_calls else None)
            if not self.num_calls and body.startswith(self.marker):
                body = body[len(self.marker) :].lstrip()
            elif not self.num_calls and body and self.marker.startswith(body):
                return
            if not body:
                return
            end = self._scan.find(body) if body[0] == "{" else 0
            if end is None:
                return
            call = call_of(body[:end])
            if call is None or call.name not in self._tool_names:  # an answer may be JSON without being a call
                self._is_content = True
                break
            self._text, self._scan = body[end:], ObjectEnd()
            yield from self._call(call)
        if self._is_content and self._text:
            text, self._text = self._text, ""
            yield from self._content(text)

    def _rest(self) -> Iterable[Piece]:
        if self.num_calls and not self._is_content:
            self._text = self._text.strip(" \t\r\n;,")
        return ()


class Forced(CallReader):
    """The list of calls that a grammar makes, [{"name": ..., "arguments": {...}}, ...], shown while it grows."""

    _HEAD = re.compile(r'[\s,\[}]*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"arguments"\s*:\s*(?=\{)')

    def __init__(self, tool_names: Collection[str], *, is_parallel: bool = True) -> None:
        super().__init__(tool_names, is_parallel=is_parallel)
        self._scan: ObjectEnd | None = None  # inside the arguments of a call
        self._num_shown = 0

    def _read(self) -> Iterable[Piece]:
        while True:
            if self._scan is None:
                head = self._HEAD.match(self._text)
                if head is None:
                    return
                yield CallStart(self.num_calls, self._new_id(), head[1])
                self.num_calls += 1
                self._text, self._scan, self._num_shown = self._text[head.end() :], ObjectEnd(), 0
            end = self._scan.find(self._text)
            shown = self._text[self._num_shown : end]
            self._num_shown += len(shown)
            if shown:
                yield CallArguments(self.num_calls - 1, shown)
            if end is None:
                return
            self._text, self._scan = self._text[end:], None

    def _rest(self) -> Iterable[Piece]:
        """Brackets, or the head of a call that max_tokens cut, are nothing to show."""
        self._text = ""
        return ()


def _num_held(text: str, marker: str) -> int:
    """Characters at the end of `text` that may be the beginning of the marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
