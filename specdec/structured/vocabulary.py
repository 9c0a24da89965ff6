"""Vocabulary: what each token of a model spells, and which tokens end an answer.

Owns: the bytes of all ids. Must not know: tokenizers (engine/token_table.py reads them) or grammars.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """token_bytes: one entry per logits column; b"" marks a token without text (special and padding ids), which no grammar allows.

    eos_token_ids end an answer, and so are allowed exactly where a grammar is complete.
    """

    token_bytes: tuple[bytes, ...]
    eos_token_ids: tuple[int, ...]

    @property
    def size(self) -> int:
        """Columns of the logits."""
        return len(self.token_bytes)

    def ending_ids(self, stop_token_ids: Collection[int]) -> tuple[int, ...]:
        """Return the ids that may end an answer: the model's own, and a request's stop ids that spell nothing.

        A stop id with text stays a token like any other: it ends the request wherever the grammar lets it be drawn.
        """
        return tuple(dict.fromkeys([*self.eos_token_ids, *(i for i in stop_token_ids if not self.token_bytes[i])]))
