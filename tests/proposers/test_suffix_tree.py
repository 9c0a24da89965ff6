"""SuffixTree answers as naive counting does, whatever was added and removed before, and holds no more than it needs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.proposers import suffix_tree
from specdec.proposers.suffix_tree import SuffixTree
from tests.proposers import naive_suffix

tokens = st.integers(0, 2)
texts = st.lists(st.lists(tokens, min_size=1, max_size=14), max_size=5)
searches = {
    "depth": st.integers(1, 6),
    "limit": st.integers(0, 5),
    "factor": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    "min_chance": st.sampled_from([0.0, 0.1, 0.4, 1.0]),
}


def tree_of(closed: list[list[int]], depth: int) -> SuffixTree:
    tree = SuffixTree(depth)
    for text in closed:
        tree.extend(text)
        tree.close()
    return tree


@settings(max_examples=300, deadline=None)
@given(texts, st.lists(tokens, min_size=1, max_size=8), st.integers(0, 5), st.fixed_dictionaries(searches))
def test_closed_texts_are_counted_exactly(closed: list[list[int]], pattern: list[int], num_removed: int, search: dict) -> None:
    tree = tree_of(closed, search["depth"])
    num_removed = min(num_removed, len(closed))
    for _ in range(num_removed):
        tree.remove_oldest()
    options = {name: search[name] for name in ("limit", "factor", "min_chance")}
    expected = naive_suffix.continue_text(closed[num_removed:], pattern, **search)
    assert tree.continue_text(pattern, **options) == expected


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(tokens, max_size=6), min_size=1, max_size=6), st.fixed_dictionaries(searches))
def test_a_growing_text_is_counted_exactly_at_every_length(pieces: list[list[int]], search: dict) -> None:
    tree, text = SuffixTree(search["depth"]), []
    options = {name: search[name] for name in ("limit", "factor", "min_chance")}
    for piece in pieces:
        tree.extend(piece)
        text += piece
        if text:
            assert tree.continue_text(text, **options) == naive_suffix.continue_text([text], text, **search)


@settings(max_examples=150, deadline=None)
@given(texts, st.integers(1, 6), st.integers(0, 5))
def test_nodes_are_those_of_a_tree_that_never_held_the_removed_texts(closed: list[list[int]], depth: int, num_removed: int) -> None:
    tree = tree_of(closed, depth)
    num_removed = min(num_removed, len(closed))
    for _ in range(num_removed):
        tree.remove_oldest()
    fresh = tree_of(closed[num_removed:], depth)
    assert tree.num_nodes == fresh.num_nodes
    assert tree.live_bytes == fresh.live_bytes
    assert tree.num_tokens == sum(map(len, closed[num_removed:]))


def test_a_long_life_as_a_queue_keeps_answers_and_memory() -> None:
    """Thousands of texts come and go through growing, shrinking and wrapping arrays."""
    rng = random.Random(3)
    tree, held = SuffixTree(8), []
    for turn in range(1500):
        text = [rng.randrange(6) for _ in range(rng.randrange(1, 60))]
        held.append(text)
        tree.extend(text)
        tree.close()
        target = 40 if turn % 500 < 300 else 3
        while len(held) > target:
            tree.remove_oldest()
            held.pop(0)
        if turn % 25 == 0:
            pattern = rng.choice(held)[-5:]
            expected = naive_suffix.continue_text(held, pattern, depth=8, limit=6, factor=1.0, min_chance=0.1)
            assert tree.continue_text(pattern, limit=6, factor=1.0, min_chance=0.1) == expected
    assert tree.num_texts == 3
    while tree.num_texts:
        tree.remove_oldest()
    assert (tree.num_nodes, tree.num_tokens) == (1, 0)
    assert tree.allocated_bytes < suffix_tree.SHRINK_ABOVE * suffix_tree.NODE_BYTES * 2


def test_repetitive_text_takes_few_nodes() -> None:
    tree = SuffixTree(24)
    tree.extend([7] * 50_000)
    tree.close()
    assert tree.num_nodes <= 25
    assert tree.allocated_bytes < 600_000
    found = tree.continue_text([7] * 24, limit=20, factor=1.0, min_chance=0.1)
    assert found.token_ids == (7,) * 12


def test_the_newest_of_equal_continuations_wins() -> None:
    tree = tree_of([[1, 2, 5], [1, 2, 6], [1, 2, 5], [1, 2, 6]], 4)
    assert tree.continue_text([1, 2], limit=1, factor=1.0, min_chance=0.0).token_ids == (6,)
    tree.remove_oldest()
    assert tree.continue_text([1, 2], limit=1, factor=1.0, min_chance=0.0).token_ids == (6,)
    tree.remove_oldest()
    assert tree.continue_text([0, 1, 2], limit=1, factor=1.0, min_chance=0.0).token_ids == (6,)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
def test_tokens_survive_a_growing_ring(length: int) -> None:
    text = [(7 * i * i) % 31 for i in range(length)]
    tree = SuffixTree(5)
    for token in text:
        tree.extend([token])
    expected = naive_suffix.continue_text([text], text, depth=5, limit=4, factor=2.0, min_chance=0.0)
    assert tree.continue_text(text, limit=4, factor=2.0, min_chance=0.0) == expected


def test_positions_begin_again_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_tree, "RENUMBER_ABOVE", 100)
    rng = random.Random(4)
    tree, held, growing = SuffixTree(6), [], []
    for turn in range(400):
        growing.append(rng.randrange(4))
        tree.extend(growing[-1:])
        if turn % 7 == 6:
            tree.close()
            held.append(growing)
            growing = []
        if len(held) > 3:
            tree.remove_oldest()
            held.pop(0)
        everything = [*held, growing] if growing else held
        if everything:
            expected = naive_suffix.continue_text(everything, everything[-1], depth=6, limit=5, factor=1.0, min_chance=0.1)
            assert tree.continue_text(everything[-1], limit=5, factor=1.0, min_chance=0.1) == expected
    assert tree._stop <= 100 + 1
