"""Blocks: counted, shared by content, evicted oldest first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.sampling_params import SamplingParams
from specdec.scheduler.kv_cache import BlockPool, KVCacheManager
from specdec.scheduler.request import Request


def request_of(token_ids: list[int], *, prompt_logprobs: int | None = None) -> Request:
    return Request(request_id="r", prompt_token_ids=tuple(token_ids), sampling=SamplingParams(prompt_logprobs=prompt_logprobs))


def manager(num_blocks: int = 10, *, hash_lookahead: int = 0, enable_prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, 4, max_model_len=32, hash_lookahead=hash_lookahead, enable_prefix_caching=enable_prefix_caching)


def compute(kv: KVCacheManager, request: Request) -> None:
    """Admit a request, compute all it has, and make its blocks findable."""
    found = kv.get_computed_blocks(request)
    num_found = len(found) * kv.block_size
    assert kv.allocate_slots(request, request.num_tokens - num_found, computed_blocks=found) is not None
    request.num_computed_tokens = request.num_tokens
    kv.cache_blocks(request)


def test_slots_cover_rows_and_lookahead_but_never_max_model_len() -> None:
    kv = manager(12)
    request = request_of(list(range(9)))
    assert kv.allocate_slots(request, 9, num_lookahead_tokens=3) == (1, 2, 3)  # 12 slots
    request.num_computed_tokens = 9
    assert kv.allocate_slots(request, 1, num_lookahead_tokens=2) == ()
    assert kv.allocate_slots(request, 1, num_lookahead_tokens=3) == (4,)
    request.num_computed_tokens = 30
    assert kv.allocate_slots(request, 2, num_lookahead_tokens=9) == (5, 6, 7, 8)  # 32 slots
    assert kv.usage == pytest.approx(8 / 11)


def test_a_refused_allocation_changes_nothing() -> None:
    kv = manager(4)
    request = request_of(list(range(13)))
    assert kv.allocate_slots(request, 13) is None
    assert (request.block_ids, kv.pool.num_free) == ([], 3)


def test_the_padding_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert 0 not in pool.take(4)
    assert pool.num_free == 0


def test_a_shared_beginning_is_found_up_to_the_last_token() -> None:
    kv = manager()
    first = request_of([*range(8)])
    compute(kv, first)
    assert kv.get_computed_blocks(request_of([*range(8), 99])) == tuple(first.block_ids)
    assert kv.get_computed_blocks(request_of([*range(8)])) == tuple(first.block_ids[:1])  # one token is left to compute
    assert kv.get_computed_blocks(request_of([*range(4), 99, 5, 6, 7, 8])) == tuple(first.block_ids[:1])
    assert kv.get_computed_blocks(request_of([99, *range(1, 9)])) == ()
    assert kv.get_computed_blocks(request_of([4, 5, 6, 7, 8])) == ()  # the same tokens at another place


def test_a_block_is_hashed_only_when_computed_and_committed() -> None:
    kv = manager()
    request = request_of([*range(8)])
    kv.allocate_slots(request, 8)
    request.num_computed_tokens, request.num_in_flight_tokens = 8, 4  # the second chunk is in flight
    kv.cache_blocks(request)
    assert len(kv.get_computed_blocks(request_of([*range(9)]))) == 1
    request.num_in_flight_tokens = 0
    kv.cache_blocks(request)
    assert len(kv.get_computed_blocks(request_of([*range(9)]))) == 2
    request.num_computed_tokens = 12  # rows of drafts, not yet tokens
    kv.allocate_slots(request, 0)
    kv.cache_blocks(request)
    assert len(kv.get_computed_blocks(request_of([*range(13)]))) == 2


def test_prompt_log_probabilities_need_every_row_so_nothing_is_shared() -> None:
    kv = manager()
    compute(kv, request_of([*range(8)]))
    assert kv.get_computed_blocks(request_of([*range(9)], prompt_logprobs=0)) == ()


def test_prefix_caching_off_finds_nothing() -> None:
    kv = manager(enable_prefix_caching=False)
    compute(kv, request_of([*range(8)]))
    assert kv.get_computed_blocks(request_of([*range(9)])) == ()


def test_a_hash_that_looks_ahead_depends_on_the_tokens_after_the_block() -> None:
    kv = manager(hash_lookahead=1)
    compute(kv, request_of([*range(9)]))
    assert len(kv.get_computed_blocks(request_of([*range(9), 50]))) == 2
    assert len(kv.get_computed_blocks(request_of([*range(8), 99, 50]))) == 1  # the drafter's KV at position 7 saw token 8
    assert len(kv.get_computed_blocks(request_of([*range(8)]))) == 1


def test_freed_blocks_stay_findable_until_they_are_needed_oldest_first() -> None:
    kv = manager(7)  # six blocks
    old, new = request_of([*range(9)]), request_of([*range(50, 58)])
    for request in (old, new):
        compute(kv, request)
    for request in (old, new):
        kv.free(request)
    assert kv.pool.num_free == 6
    assert kv.pool.take(1) == (3,)  # the half-full tail of `old`, which nobody could find
    kv.pool.take(2)  # one block never used, then the tail of the oldest
    assert len(kv.get_computed_blocks(request_of([*range(9)]))) == 1
    assert len(kv.get_computed_blocks(request_of([*range(50, 59)]))) == 2
    kv.pool.take(2)
    assert len(kv.get_computed_blocks(request_of([*range(9)]))) == 0
    assert len(kv.get_computed_blocks(request_of([*range(50, 59)]))) == 1


def test_a_found_block_is_held_by_both_and_survives_the_first_owner() -> None:
    kv = manager()
    first, second = request_of([*range(8)]), request_of([*range(8), 99])
    compute(kv, first)
    shared = list(first.block_ids)
    compute(kv, second)
    assert second.block_ids[:2] == shared
    kv.free(first)
    assert not set(kv.pool.take(kv.pool.num_free)) & set(shared)
    kv.free(second)
    assert kv.pool.num_free == 3


def test_a_found_free_block_is_not_counted_as_room_for_the_rest() -> None:
    kv = manager(4)
    first = request_of([*range(8)])
    compute(kv, first)
    kv.free(first)
    long = request_of([*range(8), *range(50, 56)])
    found = kv.get_computed_blocks(long)
    assert len(found) == 2
    assert not kv.can_admit(long, found, num_spare=0)
    assert kv.allocate_slots(long, 6, computed_blocks=found) is None
    assert kv.pool.num_free == 3
    assert kv.allocate_slots(long, 4, computed_blocks=found) is not None


def test_reset_forgets_contents_but_not_owners() -> None:
    kv = manager()
    first, second = request_of([*range(8)]), request_of([*range(9)])
    compute(kv, first)
    compute(kv, second)
    kv.reset_prefix_cache()
    for request in (first, second):
        kv.cache_blocks(request)  # what was computed before stays forgotten
    assert kv.get_computed_blocks(request_of([*range(9)])) == ()
    assert kv.pool.num_free == 6
    kv.free(first)
    kv.free(second)
    assert kv.pool.num_free == 9


def test_a_preempted_request_makes_its_blocks_findable_again() -> None:
    kv = manager(4)
    request = request_of([*range(9)])
    compute(kv, request)
    kv.free(request)
    request.reset_progress()
    kv.pool.release(kv.pool.take(3))  # somebody else used all blocks meanwhile
    assert kv.get_computed_blocks(request) == ()
    compute(kv, request)
    assert len(kv.get_computed_blocks(request_of([*range(9)]))) == 2


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 14)), max_size=40), st.integers(2, 9))
def test_free_and_held_blocks_add_up_whatever_happens(moves: list[tuple[int, int, int]], num_blocks: int) -> None:
    kv = manager(num_blocks)
    held: dict[int, Request] = {}
    for kind, slot, length in moves:
        if kind == 0 and slot not in held:
            request = request_of([i % 7 for i in range(length)])
            if kv.can_admit(request, kv.get_computed_blocks(request), num_spare=0):
                compute(kv, request)
                held[slot] = request
        elif kind == 1 and slot in held:
            kv.free(held.pop(slot))
        elif kind == 2:
            kv.reset_prefix_cache()
        owners = Counter(block for request in held.values() for block in request.block_ids)
        assert kv.pool.num_free + len(owners) == num_blocks - 1
        contents: dict[int, set[tuple[int, ...]]] = {}
        for request in held.values():
            for index, block in enumerate(request.block_ids):
                contents.setdefault(block, set()).add(request.prompt_token_ids[: (index + 1) * kv.block_size])
        assert all(len(names) == 1 for names in contents.values())  # who shares a block has the same tokens up to its end
