"""The JSON of an assistant's message and of its deltas, as /v1/chat/completions prints them.

Owns: which piece goes into which member. Must not know: streams or other members of a choice (chat.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from specdec.server.answers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from specdec.server.answers.reader import AnswerPlan


@dataclass(slots=True)
class ToolCall:
    """One call while it is gathered."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """What the pieces of one answer add up to."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Take in more pieces."""
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case CallStart(_, id, name):
                    self.calls.append(ToolCall(id, name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text


def read_whole(text: str, plan: AnswerPlan) -> Message:
    """Return the message that a finished text is."""
    message = Message(content=text)
    if not plan.is_plain:
        reader = plan.reader()
        message = Message()
        message.add(reader.feed(text))
        message.add(reader.finish())
    return message


def message_json(message: Message, plan: AnswerPlan) -> dict[str, Any]:
    """Return the object of a whole answer; content is null where calls are all there is."""
    has_no_text = not message.content and (message.calls or message.reasoning)
    members: dict[str, Any] = {"role": "assistant", "content": None if has_no_text else message.content, "refusal": None}
    if plan.reads_reasoning and plan.shows_reasoning:
        members["reasoning_content"] = message.reasoning or None
    if message.calls:
        members["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in message.calls
        ]
    return members


def delta_json(pieces: Iterable[Piece], plan: AnswerPlan) -> dict[str, Any]:
    """Return what one event adds, all pieces of it in one delta."""
    members: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        match piece:
            case Reasoning(text):
                if plan.shows_reasoning:
                    members["reasoning_content"] = members.get("reasoning_content", "") + text
            case Content(text):
                members["content"] = members.get("content", "") + text
            case CallStart(index, id, name):
                calls[index] = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    return members | {"tool_calls": list(calls.values())} if calls else members


def finish_reason(reason: str | None, plan: AnswerPlan, *, has_calls: bool) -> str | None:
    """Return the reason as OpenAI gives it: an answer that ends in calls which the model chose ends for them."""
    return "tool_calls" if reason == "stop" and has_calls and not plan.is_named else reason
