"""Pieces: what a text turns out to be while it streams: reasoning, content, or calls of tools.

Owns: the four records. Must not know: formats of models (calls.py, reasoning.py), nor the JSON of answers (message.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text the model thought aloud."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins. index counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments; all of a call's pieces joined are one object."""

    index: int
    text: str


Piece = Reasoning | Content | CallStart | CallArguments
