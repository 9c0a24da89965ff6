"""BlockPool and KVCacheManager: which KV block belongs to whom, and which may be shared.

Owns: block ids, reference counts, prefix hashes, eviction. Must not know: tensors, queues, drafts beyond their number.
Read next: scheduler/scheduler.py.

Block 0 is the padding block: never handed out, so the worker may write rubbish there. A block is hashed only when it is
full of committed tokens whose KV is computed; rejected drafts lie past those and are overwritten by the next step.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from specdec.scheduler.request import Request

NULL_BLOCK = 0
_ROOT_HASH = b""


class BlockPool:
    """All KV blocks but the padding block: free (first in line is taken next), or held by one or more requests."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_owners = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds; those with a hash can still be found until they are taken."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out at all."""
        return self.num_blocks - 1

    def take(self, count: int) -> tuple[int, ...]:
        """Hand out `count` free blocks, forgetting what the least recently used of them held."""
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} free"
        blocks = tuple(self._free.popitem(last=False)[0] for _ in range(count))
        for block in blocks:
            self._forget(block)
            self._num_owners[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to blocks that `find` returned."""
        for block in blocks:
            self._num_owners[block] += 1
            self._free.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one owner of each block. Tails are freed first, so that a shared beginning survives longest."""
        for block in reversed(blocks):
            self._num_owners[block] -= 1
            assert self._num_owners[block] >= 0, f"block {block} was released more often than taken"
            if self._num_owners[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:  # worth nothing to anybody, so it is the first to go
                    self._free.move_to_end(block, last=False)

    def find(self, block_hash: bytes) -> int | None:
        """Return the block with this content, held or free."""
        return self._block_of.get(block_hash)

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks nobody holds."""
        return sum(self._num_owners[block] == 0 for block in blocks)

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a held block findable; the first block with a content keeps it."""
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def forget_all(self) -> None:
        """Make no block findable, for example because the weights changed."""
        self._hash_of.clear()
        self._block_of.clear()

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]


class KVCacheManager:
    """Blocks of requests. Positions are tokens from the start of the request; a block holds `block_size` of them.

    hash_lookahead: tokens past a block's end that its hash covers, for drafters whose KV of a position depends on the
    tokens that follow it.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, max_model_len: int, enable_prefix_caching: bool = True, hash_lookahead: int = 0
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.enable_prefix_caching = enable_prefix_caching
        self.hash_lookahead = hash_lookahead
        self.num_queried_tokens = 0  # prompt tokens looked up, and how many of them were found
        self.num_hit_tokens = 0

    @property
    def usage(self) -> float:
        """Share of blocks held by requests, in 0..1."""
        return 1.0 - self.pool.num_free / self.pool.num_usable if self.pool.num_usable else 0.0

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, request: Request) -> tuple[int, ...]:
        """Return the longest chain of cached blocks at the start of the request, leaving at least one token to compute."""
        if not self._is_cacheable(request):
            return ()
        self._extend_hashes(request)
        usable = (request.num_tokens - max(1, self.hash_lookahead)) // self.block_size
        blocks: list[int] = []
        for block_hash in request.block_hashes[: max(usable, 0)]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def can_admit(self, request: Request, computed_blocks: Sequence[int], *, num_spare: int) -> bool:
        """Return whether all tokens the request has now fit beside what others hold, with `num_spare` blocks to spare.

        A chunk alone could fit sooner, but a prompt admitted into too little room is preempted half-way and read twice.
        """
        num_missing = self.num_blocks_for(request.num_tokens) - len(computed_blocks)
        return num_missing + num_spare <= self.pool.num_free - self.pool.num_free_among(computed_blocks)

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *, num_lookahead_tokens: int = 0, computed_blocks: Sequence[int] = ()
    ) -> tuple[int, ...] | None:
        """Reserve slots for positions up to num_computed_tokens + num_new_tokens + num_lookahead_tokens, at most max_model_len.

        computed_blocks: the start found by get_computed_blocks, for a request that holds nothing yet.

        Returns:
            Block ids taken now (the shared ones not among them), or None, and then nothing has changed.
        """
        num_computed = request.num_computed_tokens + len(computed_blocks) * self.block_size
        num_slots = min(num_computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        num_missing = max(self.num_blocks_for(num_slots) - len(request.block_ids) - len(computed_blocks), 0)
        if num_missing > self.pool.num_free - self.pool.num_free_among(computed_blocks):
            return None
        self.pool.share(computed_blocks)
        new_blocks = self.pool.take(num_missing)
        request.block_ids += [*computed_blocks, *new_blocks]
        request.num_hashed_blocks = max(request.num_hashed_blocks, len(computed_blocks))
        return new_blocks

    def count_lookup(self, request: Request) -> None:
        """Count the prompt of a request that was just admitted for the hit rate."""
        if self._is_cacheable(request):
            self.num_queried_tokens += request.num_prompt_tokens
            self.num_hit_tokens += request.num_cached_tokens

    def cache_blocks(self, request: Request) -> None:
        """Make full blocks of committed and processed tokens findable."""
        if not self._is_cacheable(request):
            return
        self._extend_hashes(request)
        num_full = min(request.num_processed_tokens // self.block_size, len(request.block_hashes))
        for index in range(request.num_hashed_blocks, num_full):
            self.pool.register(request.block_ids[index], request.block_hashes[index])
        request.num_hashed_blocks = max(request.num_hashed_blocks, num_full)

    def free(self, request: Request) -> None:
        """Give up all blocks of a request."""
        self.pool.release(request.block_ids)
        request.block_ids = []

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; blocks that requests hold stay theirs."""
        self.pool.forget_all()

    def _is_cacheable(self, request: Request) -> bool:
        # Prompt log-probabilities need the logits of every prompt row, so none may be skipped.
        return self.enable_prefix_caching and request.sampling.prompt_logprobs is None

    def _extend_hashes(self, request: Request) -> None:
        """Append hashes of blocks that committed tokens fill; each covers everything before it through its parent's hash."""
        size = self.block_size
        hashes = request.block_hashes
        while (len(hashes) + 1) * size + self.hash_lookahead <= request.num_tokens:
            start = len(hashes) * size
            token_ids = array("q", request.tokens(start, start + size + self.hash_lookahead))
            hashes.append(hashlib.sha256((hashes[-1] if hashes else _ROOT_HASH) + token_ids.tobytes()).digest())
