"""OutputItems: pieces of an answer as output items, and the events that tell of them one by one.

Owns: items, their ids, and the order of events inside a stream. Must not know: engines, the response around them (answer.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from specdec.server.answers.pieces import CallArguments, CallStart, Content, Piece, Reasoning

Event = dict[str, Any]


class OutputItems:
    """The items so far. Feed it pieces, then `finish`; each yields events without sequence numbers."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.reasoning = ""
        self._kind: str | None = None  # of the newest item, while it is open

    def feed(self, pieces: Iterable[Piece]) -> Iterator[Event]:
        """Take in pieces."""
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    self.reasoning += text
                    yield from self._text("reasoning", text)
                case Content(text):
                    yield from self._text("message", text)
                case CallStart(_, id, name):
                    yield from self._close()
                    item = {"type": "function_call", "call_id": id, "name": name, "arguments": ""}
                    yield from self._open("function_call", {"id": _new_id("fc"), **item, "status": "in_progress"})
                case CallArguments(_, text):
                    self._item["arguments"] += text
                    yield self._event("function_call_arguments.delta", delta=text)

    def finish(self, *, is_cut: bool) -> Iterator[Event]:
        """End the newest item; an answer without any text or call is an empty message."""
        if not self.items:
            yield from self._text("message", "")
        yield from self._close("incomplete" if is_cut else "completed")

    @property
    def _item(self) -> dict[str, Any]:
        return self.items[-1]

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        part_type = "reasoning_text" if kind == "reasoning" else "output_text"
        if self._kind != kind:
            yield from self._close()
            empty: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            head = {"id": _new_id("rs" if kind == "reasoning" else "msg"), "type": kind, **empty}
            yield from self._open(kind, {**head, "content": [], "status": "in_progress"})
            part: dict[str, Any] = {"type": part_type, "text": ""} | ({} if kind == "reasoning" else {"annotations": [], "logprobs": []})
            self._item["content"].append(part)
            yield self._event("content_part.added", content_index=0, part=dict(part))
        if text:
            self._item["content"][0]["text"] += text
            more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
            yield self._event(f"{part_type}.delta", content_index=0, delta=text, **more)

    def _open(self, kind: str, item: dict[str, Any]) -> Iterator[Event]:
        self.items.append(item)
        self._kind = kind
        shown = dict(item) | ({"content": []} if "content" in item else {})
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown}

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """End the newest item, if one is open."""
        kind, self._kind = self._kind, None
        if kind is None:
            return
        item = self._item
        if kind == "function_call":
            yield self._event("function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        else:
            part = item["content"][0]
            more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
            yield self._event(f"{part['type']}.done", content_index=0, text=part["text"], **more)
            yield self._event("content_part.done", content_index=0, part=dict(part))
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _event(self, kind: str, /, **members: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self._item["id"], "output_index": len(self.items) - 1, **members}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
