"""SuffixTree: how often every short string occurs in some texts, and what followed it, in microseconds.

Owns: a compressed tree of all suffixes cut at `depth` tokens, in flat arrays, grown at the end and trimmed at the front.
Must not know: requests, tenants, drafts. Read next: suffix.py. Idea: Oliaro et al. 2411.04975; the exact meaning of a
search is written down naively in tests/proposers/naive_suffix.py.

A node is a string; its edge holds the last `length` tokens of it, found at logical position `label` of the token ring (always
the newest occurrence). `count` says how often the string occurs. A position inside an edge is a string too, with the count of
the node below, since every string at which a text ends has a node of its own. The newest `depth` - 1 suffixes of a text that
still grows are not in the tree: they are compared token by token ("the tail").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.proposers.suffix_nodes import LIVE, Arrays, fill_table, insert_suffixes, remove_suffixes, search

MIN_NODES, MIN_TOKENS = 64, 64
INSERT_AT_ONCE = 256  # suffixes; room is reserved for two nodes each, though repetitive text needs far fewer
SHRINK_ABOVE = 4096  # arrays of fewer entries are not worth rebuilding
NODE_BYTES = 9 * 4 + 2 * 4  # its row, and two slots of the child table
RENUMBER_ABOVE = 2**30  # positions are int32: they begin at 0 again before they overflow


@dataclass(frozen=True, slots=True)
class Continuation:
    """What most likely follows. chances: of each token given the ones before it. score: sum of path probabilities, the expected
    number of tokens that come true. match_length: tokens of the text that were matched."""

    token_ids: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    score: float = 0.0
    match_length: int = 0


class SuffixTree:
    """Counts of all strings of up to `depth` tokens over closed texts and at most one that still grows.

    Texts leave in the order they came. Counts are exact, and memory follows what is held: nodes that no text needs are freed,
    and arrays that are mostly empty are rebuilt smaller.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._texts: deque[tuple[int, int]] = deque()  # closed ones, as [start, stop) of logical positions
        self._start = self._stop = 0  # of the growing text
        self._inserted = 0  # its suffixes below this position are in the tree
        self._arrays = _allocate(MIN_NODES, MIN_TOKENS)
        self._out = (np.empty(depth, np.int32), np.empty(depth, np.float64))

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return self._stop - self._begin

    @property
    def num_texts(self) -> int:
        """Closed texts."""
        return len(self._texts)

    @property
    def num_nodes(self) -> int:
        """Nodes in use, the root included."""
        return int(self._arrays.state[LIVE])

    @property
    def live_bytes(self) -> int:
        """Bytes that the texts need."""
        return self.num_nodes * NODE_BYTES + self.num_tokens * 4

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the arrays take."""
        return sum(array.nbytes for array in self._arrays)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the growing text."""
        if not token_ids:
            return
        if self._stop + len(token_ids) > RENUMBER_ABOVE:
            self._rebuild()
        self._reserve_tokens(len(token_ids))
        _write(self._arrays.tokens, self._stop, np.asarray(token_ids, dtype=np.int32))
        self._stop += len(token_ids)
        self._insert_up_to(max(self._stop - self.depth + 1, self._inserted))

    def close(self) -> None:
        """End the growing text: its last suffixes enter the tree, and the next token begins another text."""
        self._insert_up_to(self._stop)
        if self._stop > self._start:
            self._texts.append((self._start, self._stop))
        self._start = self._stop

    def remove_oldest(self) -> None:
        """Forget the closed text that came first."""
        start, stop = self._texts.popleft()
        remove_suffixes(self._arrays, start, stop, self.depth)
        used = ((self.num_nodes, len(self._arrays.nodes)), (self.num_tokens, len(self._arrays.tokens)))
        if any(capacity > max(4 * number, SHRINK_ABOVE) for number, capacity in used):
            self._rebuild()

    def continue_text(self, pattern: Sequence[int], *, limit: int, factor: float, min_chance: float) -> Continuation:
        """Return the continuation of `pattern` (the end of some text) with the highest score over all lengths of the match.

        limit: tokens at most; factor: at most so many per matched token; min_chance: path probability at which it stops.
        """
        tokens = np.asarray(pattern[-self.depth :], dtype=np.int32)
        num, score, matched = search(
            self._arrays, tokens, self.depth, limit, factor, min_chance, self._inserted, self._stop, self._out[0], self._out[1]
        )
        if not num:
            return Continuation()
        paths = self._out[1][:num].tolist()
        chances = tuple(later / earlier for earlier, later in zip([1.0, *paths], paths, strict=False))
        return Continuation(tuple(self._out[0][:num].tolist()), chances, score, matched)

    @property
    def _begin(self) -> int:
        return self._texts[0][0] if self._texts else self._start

    def _insert_up_to(self, position: int) -> None:
        """Insert the growing text's suffixes that start below `position`."""
        self._insert(self._inserted, position, self._stop)
        self._inserted = max(position, self._inserted)

    def _insert(self, first: int, last: int, stop: int) -> None:
        """Insert the suffixes that start at first to last - 1 of the text that ends at `stop`."""
        for begin in range(first, last, INSERT_AT_ONCE):
            end = min(begin + INSERT_AT_ONCE, last)
            self._reserve_nodes(2 * (end - begin))  # each may add a leaf, and split one edge
            insert_suffixes(self._arrays, begin, end, stop, self.depth)

    def _reserve_nodes(self, more: int) -> None:
        needed = self.num_nodes + more
        if needed > len(self._arrays.nodes):
            self._arrays = _grown(self._arrays, _power_of_two(needed))

    def _reserve_tokens(self, more: int) -> None:
        needed = self.num_tokens + more
        if needed > len(self._arrays.tokens):
            self._arrays = self._arrays._replace(
                tokens=_moved(self._arrays.tokens, self._begin, self._stop, _power_of_two(needed), first=self._begin)
            )

    def _rebuild(self) -> None:
        """Move into arrays of the right size, by inserting everything again at positions from 0 on."""
        begin, num_tokens = self._begin, _power_of_two(max(self.num_tokens, MIN_TOKENS))
        tokens = _moved(self._arrays.tokens, begin, self._stop, num_tokens, first=0)
        self._arrays = _allocate(_power_of_two(max(self.num_nodes, MIN_NODES)), 1)._replace(tokens=tokens)
        self._texts = deque((start - begin, stop - begin) for start, stop in self._texts)
        self._start, self._stop, self._inserted = self._start - begin, self._stop - begin, self._inserted - begin
        for start, stop in self._texts:
            self._insert(start, stop, stop)
        self._insert(self._start, self._inserted, self._stop)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _allocate(num_nodes: int, num_tokens: int) -> Arrays:
    return Arrays(
        tokens=np.zeros(num_tokens, np.int32),
        nodes=np.zeros((num_nodes, 9), np.int32),
        table=np.zeros(2 * num_nodes, np.int32),
        state=np.array([1, 0, 1], np.int64),
    )


def _grown(arrays: Arrays, num_nodes: int) -> Arrays:
    """The same tree with room for `num_nodes`; the child table is filled again."""
    larger = _allocate(num_nodes, 1)._replace(tokens=arrays.tokens, state=arrays.state)
    larger.nodes[: len(arrays.nodes)] = arrays.nodes
    fill_table(larger)
    return larger


def _moved(tokens: Any, start: int, stop: int, capacity: int, *, first: int) -> Any:
    """The ring's positions start to stop - 1, as positions from `first` on in a ring of another capacity."""
    moved = np.zeros(capacity, np.int32)
    _write(moved, first, tokens[np.arange(start, stop) & (len(tokens) - 1)])
    return moved


def _write(tokens: Any, position: int, token_ids: Any) -> None:
    tokens[np.arange(position, position + len(token_ids)) & (len(tokens) - 1)] = token_ids
