"""Matcher: where one request stands in its grammar, and what may come next after any path of drafts.

Owns: advancing over emitted tokens, and trying drafts out and taking them back. Must not know: batches or logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specdec.structured.compiler import Grammar

WORD_BITS = 32  # one mask is a row of int32 words, one bit for each id


class Matcher:
    """The state after the emitted tokens, and after drafts while some are applied: `apply(())` takes them back.

    stop_token_ids: the request's own. output: tokens emitted before, those of a request that comes back from preemption.
    fault: set once the grammar refuses an emitted token, which then ends the request as an error.
    """

    def __init__(self, grammar: Grammar, *, stop_token_ids: Sequence[int] = (), output: Sequence[int] = ()) -> None:
        import xgrammar

        self.size = grammar.vocabulary.size
        self._token_bytes = grammar.vocabulary.token_bytes
        self.fault: str | None = None
        self._ends = grammar.vocabulary.ending_ids(stop_token_ids)
        self._state: Any = xgrammar.GrammarMatcher(grammar.compiled, override_stop_tokens=list(self._ends))
        self._path: list[int] = []  # drafts that are applied at the moment
        self.advance(output)

    @property
    def num_words(self) -> int:
        """Words of one mask."""
        return -(-self.size // WORD_BITS)

    @property
    def has_ended(self) -> bool:
        """True after an ending token: nothing may follow the text (or the drafts that are applied)."""
        return bool(self._state.is_terminated())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Move over emitted tokens, with no draft applied. What follows an ending token is ignored: the request ends there."""
        for token_id in token_ids:
            if self.has_ended or self.fault is not None:
                return
            if not self._accept(token_id):
                self.fault = f"the grammar does not allow token {token_id}, which was emitted"

    def apply(self, path: Sequence[int]) -> int:
        """Stand behind the drafts of `path`, leaving those of the last call; return how many the grammar allows, in a row.

        Nothing is allowed behind an ending token.
        """
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if len(self._path) > shared:
            self._state.rollback(len(self._path) - shared)
            del self._path[shared:]
        for token_id in path[shared:]:
            if self.has_ended or self.fault is not None or not self._accept(token_id):
                break
            self._path.append(token_id)
        return len(self._path)

    def fill(self, mask: torch.Tensor, row: int) -> None:
        """Write what may come next into row `row` of mask [rows, words] int32; once the answer has ended, that is its end again."""
        if self.fault is not None:
            mask[row] = -1  # the request ends as an error
        elif self.has_ended:
            mask[row] = self._ends_mask()
        else:
            self._state.fill_next_token_bitmask(mask, row)

    def _ends_mask(self) -> torch.Tensor:
        bits = torch.zeros(self.num_words * WORD_BITS, dtype=torch.int64)
        bits[list(self._ends)] = 1
        words = (bits.view(-1, WORD_BITS) << torch.arange(WORD_BITS)).sum(1)
        return words.to(torch.int32)  # the top bit wraps round to the sign

    def _accept(self, token_id: int) -> bool:
        """Try one token. The library warns of ids that spell nothing, though to draft one is no fault, so it never sees them."""
        is_text = 0 <= token_id < self.size and (self._token_bytes[token_id] or token_id in self._ends)
        return bool(is_text and self._state.accept_token(token_id))
