"""CorpusShelf: texts that somebody handed in to draft from, by name, each seen only by the key that brought it.

Owns: the trees of such texts, their names and their limit. Must not know: HTTP, requests. Any thread may add and remove; the engine's
thread only searches, over a tuple that is replaced as a whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.errors import RequestRejected
from specdec.proposers.suffix_tree import Continuation, SuffixTree

MAX_BYTES = 512 * 2**20  # of all corpora together
MAX_NAMES = 64  # of one tenant: each is searched at every step


@dataclass(frozen=True, slots=True)
class CorpusInfo:
    """One corpus. created_s is Unix time; num_bytes is host memory."""

    name: str
    num_texts: int
    num_tokens: int
    num_bytes: int
    created_s: int


@dataclass(frozen=True, slots=True)
class _Entry:
    info: CorpusInfo
    tree: SuffixTree


class CorpusShelf:
    """Corpora by tenant and name. depth: longest match that is searched."""

    def __init__(self, depth: int, *, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.time) -> None:
        self._depth, self._max_bytes, self._clock = depth, max_bytes, clock
        self._lock = threading.Lock()
        self._entries: dict[str, tuple[_Entry, ...]] = {}

    @property
    def num_bytes(self) -> int:
        """Host memory of all corpora."""
        return sum(entry.info.num_bytes for entries in tuple(self._entries.values()) for entry in entries)

    def add(self, tenant: str, name: str, texts: Sequence[Sequence[int]]) -> CorpusInfo:
        """Learn token ids under a name; one of the same name is replaced.

        Raises:
            RequestRejected: there is no text, too many names, or no room.
        """
        tree = SuffixTree(self._depth)
        for ids in texts:
            tree.extend(ids)
            tree.close()
        if not tree.num_tokens:
            raise RequestRejected("the corpus holds no token", param="texts", hint="send at least one text that is not empty")
        info = CorpusInfo(name, tree.num_texts, tree.num_tokens, tree.allocated_bytes, int(self._clock()))
        with self._lock:
            others = tuple(entry for entry in self._entries.get(tenant, ()) if entry.info.name != name)
            if len(others) >= MAX_NAMES:
                message = f"there are {len(others)} corpora already, the limit of this server"
                raise RequestRejected(message, param="name", hint="remove one, or put texts together")
            replaced = sum(entry.info.num_bytes for entry in self._entries.get(tenant, ())) - sum(x.info.num_bytes for x in others)
            room = self._max_bytes - self.num_bytes + replaced
            if info.num_bytes > room:
                message = f"the corpus takes {info.num_bytes} bytes of memory, but {max(room, 0)} of {self._max_bytes} are left"
                raise RequestRejected(message, param="texts", hint="remove another corpus, or send less text")
            self._entries[tenant] = (*others, _Entry(info, tree))
        return info

    def remove(self, tenant: str, name: str) -> bool:
        """Forget a corpus; False where there was none of that name."""
        with self._lock:
            before = self._entries.get(tenant, ())
            left = tuple(entry for entry in before if entry.info.name != name)
            if left:
                self._entries[tenant] = left
            else:
                self._entries.pop(tenant, None)
        return len(left) < len(before)

    def list(self, tenant: str) -> list[CorpusInfo]:
        """What a tenant has, oldest first."""
        return [entry.info for entry in self._entries.get(tenant, ())]

    def continue_text(self, tenant: str, pattern: Sequence[int], *, limit: int, factor: float, min_chance: float) -> Continuation:
        """The best continuation of the tenant's corpora; an empty one where nothing matches."""
        best = Continuation()
        for entry in self._entries.get(tenant, ()):
            found = entry.tree.continue_text(pattern, limit=limit, factor=factor, min_chance=min_chance)
            if found.score > best.score:
                best = found
        return best
