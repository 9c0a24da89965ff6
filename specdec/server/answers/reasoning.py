"""ReasoningReader: what stands between <think> and </think> apart from the answer, over any cut of the text.

Owns: the two tags and who opens them. Must not know: tools, HTTP. Read next: reader.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.server.answers.pieces import Content, Piece, Reasoning

START, END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """is_implied: a text without the opening tag begins with reasoning all the same."""

    name: str
    is_implied: bool


FORMATS = {
    "qwen3": ReasoningFormat("qwen3", is_implied=False),
    "deepseek_r1": ReasoningFormat("deepseek_r1", is_implied=True),
}


def begins_inside(format: ReasoningFormat, prompt: str) -> bool:
    """True when the answer to this prompt begins inside the reasoning: its template opened it, or the model leaves the tag out.

    A template that wrote both tags has turned reasoning off.
    """
    end = prompt.rstrip()
    if end.endswith(START):
        return True
    return format.is_implied and not end.endswith(END)


class ReasoningReader:
    """Splits one answer. White space beside the tags belongs to neither part."""

    def __init__(self, *, is_inside: bool) -> None:
        self._is_inside = is_inside
        self._has_begun = False  # something was read that is neither white space nor the opening tag
        self._is_over = False
        self._text = ""

    def feed(self, text: str) -> list[Piece]:
        """Add text and return what is known by now."""
        self._text += text
        if not self._is_over and not self._has_begun and not self._begin():
            return []
        return self._take_answer() if self._is_over else self._take_reasoning()

    def finish(self) -> list[Piece]:
        """Return the rest: an opening tag that never came whole is text, and reasoning that was never closed stays reasoning."""
        rest, self._text = self._text, ""
        if not rest or self._is_over:
            return []
        if self._has_begun or self._is_inside:
            return _reasoning(rest.rstrip() if rest.strip() else "")
        return [Content(rest)]

    def _take_reasoning(self) -> list[Piece]:
        before, has_end, behind = self._text.partition(END)
        if has_end:
            self._is_over, self._has_begun, self._text = True, False, behind
            return [*_reasoning(before.rstrip()), *self._take_answer()]
        shown = before[: len(before) - _num_held(before)]
        self._text = before[len(shown) :]
        return _reasoning(shown)

    def _begin(self) -> bool:
        """Decide how the text begins; False: that needs more of it."""
        body = self._text.lstrip()
        if START.startswith(body) and body != START:  # also when there is nothing yet
            return False
        if body.startswith(START):
            self._is_inside, self._text = True, body[len(START) :].lstrip()
            self._has_begun = bool(self._text)
            return self._has_begun
        self._has_begun = True
        if self._is_inside:
            self._text = body
        else:
            self._is_over = True
        return True

    def _take_answer(self) -> list[Piece]:
        text, self._text = self._text, ""
        return self._answer(text)

    def _answer(self, text: str) -> list[Piece]:
        """The first text behind the reasoning begins with what can be seen."""
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
        return [Content(text)] if text else []


def _reasoning(text: str) -> list[Piece]:
    return [Reasoning(text)] if text else []


def _num_held(text: str) -> int:
    """Characters at the end that may belong to the closing tag: a part of it, and white space in front."""
    kept = text
    for length in range(min(len(END) - 1, len(text)), 0, -1):
        if text.endswith(END[:length]):
            kept = text[:-length]
            break
    return len(text) - len(kept.rstrip())
