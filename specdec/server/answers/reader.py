"""AnswerReader: one answer's text to pieces: reasoning first, then content and calls.

Owns: the order of the two readers, and what a request makes of them. Must not know: HTTP, tokens. Read next: message.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specdec.server.answers.calls import CallReader
from specdec.server.answers.pieces import Content, Piece
from specdec.server.answers.reasoning import END, START, ReasoningReader


class AnswerReader:
    """Reads one answer. reasoning and calls: None where the text has no such part."""

    def __init__(self, reasoning: ReasoningReader | None, calls: CallReader | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def feed(self, text: str) -> list[Piece]:
        """Add text and return the pieces that it completes."""
        return self._after_reasoning(self._reasoning.feed(text) if self._reasoning else [Content(text)])

    def finish(self) -> list[Piece]:
        """Return the pieces that the end of the text decides."""
        pieces = self._after_reasoning(self._reasoning.finish() if self._reasoning else [])
        return pieces + (self._calls.finish() if self._calls else [])

    def _after_reasoning(self, pieces: Iterable[Piece]) -> list[Piece]:
        if self._calls is None:
            return [piece for piece in pieces if not isinstance(piece, Content) or piece.text]
        found: list[Piece] = []
        for piece in pieces:
            found += self._calls.feed(piece.text) if isinstance(piece, Content) else [piece]
        return found


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How the answers of one request are read.

    calls: the class that reads calls. reads_reasoning, begins_inside: of reasoning.py. shows_reasoning False: it is left out.
    is_named: the client named the one tool that is called.
    """

    calls: type[CallReader] | None = None
    tool_names: tuple[str, ...] = ()
    is_parallel: bool = True
    is_named: bool = False
    reads_reasoning: bool = False
    begins_inside: bool = False
    shows_reasoning: bool = True

    @property
    def is_plain(self) -> bool:
        """True when the text is the answer."""
        return self.calls is None and not self.reads_reasoning

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the readers look for, each of which may be one special token."""
        calls = (self.calls.marker,) if self.calls and self.calls.marker else ()
        return calls + ((START, END) if self.reads_reasoning else ())

    def reader(self) -> AnswerReader:
        """Return the reader of one more answer."""
        reasoning = ReasoningReader(is_inside=self.begins_inside) if self.reads_reasoning else None
        calls = self.calls(self.tool_names, is_parallel=self.is_parallel) if self.calls else None
        return AnswerReader(reasoning, calls)


PLAIN = AnswerPlan()
