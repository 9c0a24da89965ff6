"""Deltas: what each engine output adds to the messages of one stream.

Owns: one reader and one message for each choice. Must not know: events (chat.py) or requests.
"""

from __future__ import annotations

from typing import Any

from specdec.engine.types import EngineOutput
from specdec.server.answers.message import Message, delta_json, finish_reason
from specdec.server.answers.pieces import Content, Piece
from specdec.server.answers.reader import AnswerPlan


class Deltas:
    """The choices of one stream. `messages`: what each of them was so far (not kept where the text is the answer)."""

    def __init__(self, plan: AnswerPlan, num_choices: int) -> None:
        self.messages = [Message() for _ in range(num_choices)]
        self._plan = plan
        self._readers = [None if plan.is_plain else plan.reader() for _ in range(num_choices)]

    def of(self, index: int, output: EngineOutput) -> dict[str, Any]:
        """Return the delta of one output of one choice, {} when it shows nothing."""
        return delta_json(self.pieces(index, output), self._plan)

    def pieces(self, index: int, output: EngineOutput) -> list[Piece]:
        """Return what one output completes; with the last one everything."""
        reader = self._readers[index]
        if reader is None:
            return [Content(output.text)] if output.text else []
        pieces = reader.feed(output.text) if output.text else []
        if output.finish_reason is not None:
            pieces += reader.finish()
        self.messages[index].add(pieces)
        return pieces

    def finish_reason(self, index: int, output: EngineOutput) -> str | None:
        """Return the reason that the event of this output carries."""
        return finish_reason(output.finish_reason, self._plan, has_calls=bool(self.messages[index].calls))
