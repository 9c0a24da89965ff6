"""ResponseCache: suffix trees of past responses, one per tenant, first in first out, bounded in number and in bytes.

Owns: who may learn from whom, and eviction. Must not know: live requests. Read next: suffix.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from specdec.logging import get_logger
from specdec.proposers.suffix_tree import Continuation, SuffixTree

logger = get_logger(__name__)


class ResponseCache:
    """What past requests answered. A tenant sees its own responses only, and "" (nobody in particular) has none,
    unless `is_shared`: then everybody learns from everybody.

    max_responses: over all tenants; 0 turns the cache off. max_bytes: of live nodes and tokens; arrays may take twice that.
    """

    def __init__(self, depth: int, *, max_responses: int, max_bytes: int, is_shared: bool) -> None:
        self.depth, self.max_responses, self.max_bytes, self.is_shared = depth, max_responses, max_bytes, is_shared
        self._trees: dict[str, SuffixTree] = {}
        self._order: deque[str] = deque()  # the tenant of each response, oldest first
        self._live_bytes = 0
        self._has_filled_bytes = False

    @property
    def num_responses(self) -> int:
        """Responses held."""
        return len(self._order)

    @property
    def live_bytes(self) -> int:
        """Bytes that the responses need."""
        return self._live_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the trees take."""
        return sum(tree.allocated_bytes for tree in self._trees.values())

    def learn(self, tenant: str, token_ids: Sequence[int]) -> None:
        """Add a response, and let the oldest go until all fit; one too large for the whole cache is not kept."""
        name = self._name(tenant)
        if name is None or not token_ids:
            return
        tree = self._trees.get(name)
        if tree is None:
            tree = self._trees[name] = SuffixTree(self.depth)
            self._live_bytes += tree.live_bytes
        before = tree.live_bytes
        tree.extend(token_ids)
        tree.close()
        self._live_bytes += tree.live_bytes - before
        self._order.append(name)
        self._evict()

    def continue_text(self, tenant: str, pattern: Sequence[int], *, limit: int, factor: float, min_chance: float) -> Continuation:
        """Return what the tenant's past responses suggest; see SuffixTree."""
        tree = self._trees.get(self._name(tenant) or "")
        if tree is None:
            return Continuation()
        return tree.continue_text(pattern, limit=limit, factor=factor, min_chance=min_chance)

    def _name(self, tenant: str) -> str | None:
        """The key of a tenant's tree, or None where nothing may be kept."""
        if self.max_responses == 0:
            return None
        if self.is_shared:
            return "shared"
        return f"tenant {tenant}" if tenant else None

    def _evict(self) -> None:
        while len(self._order) > self.max_responses or (self._order and self._live_bytes > self.max_bytes):
            if self._live_bytes > self.max_bytes and not self._has_filled_bytes:
                self._has_filled_bytes = True
                logger.info("suffix cache: %d responses fill its %d MiB; the oldest go first", len(self._order), self.max_bytes >> 20)
            name = self._order.popleft()
            tree = self._trees[name]
            before = tree.live_bytes
            tree.remove_oldest()
            self._live_bytes += tree.live_bytes - before
            if tree.num_texts == 0:
                self._live_bytes -= tree.live_bytes
                del self._trees[name]
