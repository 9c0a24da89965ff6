"""Input items of /v1/responses as chat messages.

Owns: which items are known. Must not know: templates, output. Read next: answer.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from specdec.errors import RequestRejected
from specdec.server.protocol import ChatMessage
from specdec.server.tool_bodies import CalledFunction, MessageCall

Role = Literal["system", "developer", "user", "assistant"]
ROLES = ("system", "developer", "user", "assistant")
TEXTS = ("input_text", "output_text", "text")


def messages_of(given: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[ChatMessage]:
    """Return the conversation: instructions as the first system message, then the input.

    Calls that stand together, and the assistant's text and reasoning before them, are one message, as templates know it.

    Raises:
        RequestRejected: an item is not known or not complete; the message says which one.
    """
    messages = [ChatMessage(role="system", content=instructions)] if instructions else []
    if isinstance(given, str):
        return [*messages, ChatMessage(role="user", content=given)]
    gathered = _Gathered(messages)
    for index, item in enumerate(given):
        gathered.add(item, f"input[{index}]")
    gathered.close()
    if not any(message.role != "system" for message in gathered.messages):
        raise RequestRejected("input holds no message", param="input", hint="add one of the user")
    return gathered.messages


class _Gathered:
    """Messages so far, and the parts of an assistant's message that may go on."""

    def __init__(self, messages: list[ChatMessage]) -> None:
        self.messages = messages
        self._text: str | None = None
        self._reasoning = ""
        self._calls: list[MessageCall] = []

    def add(self, item: Mapping[str, Any], place: str) -> None:
        """Take in one item."""
        match item.get("type", "message"):
            case "message":
                self._message(item, place)
            case "function_call":
                function = CalledFunction(name=_text(item, "name", place), arguments=_text(item, "arguments", place))
                self._calls.append(MessageCall(id=_text(item, "call_id", place), function=function))
            case "function_call_output":
                self.close()
                output = _content(item.get("output"), f"{place}.output")
                self.messages.append(ChatMessage(role="tool", tool_call_id=_text(item, "call_id", place), content=output))
            case "reasoning":
                self._reason(item, place)
            case other:
                known = "message, function_call, function_call_output and reasoning"
                raise RequestRejected(f"{place}.type is {str(other)[:40]!r}, but the items served here are {known}", param="input")

    def close(self) -> None:
        """End the assistant's message, if one is open."""
        if self._text is None and not self._calls:
            return
        fields: dict[str, Any] = {"content": self._text or ""}
        if self._calls:
            fields["tool_calls"] = self._calls
        if self._reasoning:
            fields["reasoning_content"] = self._reasoning
        self.messages.append(ChatMessage(role="assistant", **fields))
        self._text, self._reasoning, self._calls = None, "", []

    def _message(self, item: Mapping[str, Any], place: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise RequestRejected(f"{place}.role is {str(role)[:40]!r}, but it must be one of {', '.join(ROLES)}", param="input")
        text = _content(item.get("content"), f"{place}.content")
        if role != "assistant" or self._text is not None or self._calls:
            self.close()
        if role == "assistant":
            self._text = text
        else:
            self.messages.append(ChatMessage(role=cast(Role, role), content=text))

    def _reason(self, item: Mapping[str, Any], place: str) -> None:
        if item.get("encrypted_content"):
            raise RequestRejected(f"{place}.encrypted_content cannot be read here", param="input", hint="leave it out")
        self.close()
        self._reasoning += "".join(_parts(item.get("content") or (), f"{place}.content", ("reasoning_text",)))


def _content(value: Any, place: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(_parts(value, place, TEXTS))
    raise RequestRejected(f"{place} is {repr(value)[:40]}, but it must be a string or a list of parts", param="input")


def _parts(parts: Any, place: str, kinds: Sequence[str]) -> list[str]:
    texts = []
    for part in parts if isinstance(parts, list) else [parts] if parts else []:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in kinds or not isinstance(part.get("text"), str):
            rule = f"only text is served, as {{'type': {kinds[0]!r}, 'text': ...}}"
            raise RequestRejected(f"a part of {place} has type {str(kind)[:40]!r}, but {rule}", param="input")
        texts.append(str(part["text"]))
    return texts


def _text(item: Mapping[str, Any], key: str, place: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise RequestRejected(f"{place}.{key} is {repr(value)[:40]}, but it must be a string that is not empty", param="input")
    return value
