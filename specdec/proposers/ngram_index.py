"""NgramIndex: where each n-gram of a growing text was last followed by a token.

Owns: one text and its tables. Must not know: requests, tensors. Read next: ngram.py.
"""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """Where each n-gram of one text was last followed by a token: O(max - min + 1) per new token and per lookup."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest
        self.tokens: list[int] = []
        self._next_of: list[dict[tuple[int, ...], int]] = [{} for _ in range(shortest, longest + 1)]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram is entered once a token follows it, so that a suffix never matches itself."""
        for token in tokens:
            end = len(self.tokens)  # the n-grams that end just before `end` are now followed by `token`
            for size, table in enumerate(self._next_of, self.shortest):
                if end >= size:
                    table[tuple(self.tokens[end - size : end])] = end
            self.tokens.append(token)

    def lookup(self, count: int) -> list[int]:
        """Return up to `count` tokens that followed the longest matching suffix, the most recent time it occurred."""
        for size in range(self.longest, self.shortest - 1, -1):
            if len(self.tokens) < size:
                continue
            start = self._next_of[size - self.shortest].get(tuple(self.tokens[-size:]))
            if start is not None:
                return self.tokens[start : start + count]
        return []
