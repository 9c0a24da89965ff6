"""Masks of a block equal those of a fresh matcher that was fed each path alone; nothing that was tried leaves a trace."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from specdec.engine.tokenizer import Tokenizer
from specdec.structured.compiler import Grammar
from specdec.structured.mask import DraftMasks, allowed_ids, block_mask, forbid, num_valid
from specdec.structured.matcher import Matcher
from tests.structured.vocabulary import EOS, TOOL, VOCAB_SIZE

SCHEMA = json.dumps(
    {"type": "object", "properties": {"id": {"type": "integer"}, "name": {"enum": ["ab", "b"]}}, "required": ["id", "name"]}
)
CPU = torch.device("cpu")


def after(grammar: Grammar, path: Sequence[int]) -> list[bool]:
    """What a fresh matcher allows behind `path`."""
    mask = torch.zeros(1, -(-VOCAB_SIZE // 32), dtype=torch.int32)
    Matcher(grammar, output=path).fill(mask, 0)
    return bits(mask)[0]


def bits(mask: torch.Tensor) -> list[list[bool]]:
    rows: list[list[bool]] = allowed_ids(mask, VOCAB_SIZE, device=CPU).tolist()
    return rows


def random_path(grammar: Grammar, rng: random.Random, length: int, *, chance: float) -> list[int]:
    """Tokens of which each is allowed with probability `chance`, else any at all, -1 and ids out of range among them."""
    path: list[int] = []
    for _ in range(length):
        allowed = [i for i, is_allowed in enumerate(after(grammar, path)) if is_allowed]
        path.append(rng.choice(allowed) if allowed and rng.random() < chance else rng.randrange(-1, VOCAB_SIZE + 5))
    return path


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_tree", [False, True])
def test_rows_of_a_block_are_what_fresh_matchers_say(grammar: Callable[..., Grammar], seed: int, is_tree: bool) -> None:
    compiled, rng = grammar(json_schema=SCHEMA), random.Random(seed)
    matcher = Matcher(compiled)
    before = after(compiled, [])
    drafts = random_path(compiled, rng, 9, chance=0.9)
    parents = [rng.randrange(-1, node) if is_tree and node else node - 1 for node in range(len(drafts))]
    mask, allowed = block_mask(matcher, drafts, parents if is_tree else None)
    rows = bits(mask)
    assert rows[0] == before
    paths: list[list[int]] = []
    for node, draft in enumerate(drafts):
        path = paths[parents[node]] if parents[node] >= 0 else []
        fits = (
            (parents[node] < 0 or allowed[parents[node]]) and 0 <= draft < VOCAB_SIZE and EOS not in path and after(compiled, path)[draft]
        )
        assert allowed[node] == fits
        paths.append([*path, draft])
        if allowed[node]:
            assert rows[node + 1] == after(compiled, paths[node])
    again, _ = block_mask(matcher, [], None)
    assert bits(again)[0] == before, "the drafts were taken back"


def test_an_end_is_allowed_exactly_where_the_grammar_is_complete(grammar: Callable[..., Grammar], tokenizer: Tokenizer) -> None:
    compiled = grammar(regex="ab?")
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    mask, allowed = block_mask(Matcher(compiled), [a, b, EOS, a], None)
    rows = bits(mask)
    assert allowed == [True, True, True, False], "nothing follows an end"
    assert [row[EOS] for row in rows[:4]] == [False, True, True, True]
    assert rows[2].count(True) == rows[3].count(True) == 1, "a complete text may only end"
    assert not any(row[TOOL] for row in rows[:4]), "special tokens have no text"
    assert num_valid(Matcher(compiled), [a, EOS, EOS]) == 2
    assert num_valid(Matcher(compiled), [EOS]) == num_valid(Matcher(compiled), [-1]) == num_valid(Matcher(compiled), [VOCAB_SIZE]) == 0


def test_a_stop_id_without_text_ends_too(grammar: Callable[..., Grammar], tokenizer: Tokenizer) -> None:
    compiled = grammar(regex="ab?")
    (a,) = tokenizer.encode("a")
    assert num_valid(Matcher(compiled, stop_token_ids=(TOOL, a)), [a, TOOL]) == 2
    assert num_valid(Matcher(compiled, stop_token_ids=(TOOL,)), [TOOL]) == 0


def test_a_matcher_that_comes_back_stands_where_it_stood(grammar: Callable[..., Grammar], tokenizer: Tokenizer) -> None:
    compiled = grammar(json_schema=SCHEMA)
    output = tokenizer.encode('{"id": 12, "na')
    advanced = Matcher(compiled)
    for token_id in output:
        advanced.advance([token_id])
    assert advanced.fault is None
    drafts = tokenizer.encode('me": "ab"}')
    for matcher in (advanced, Matcher(compiled, output=output)):
        mask, allowed = block_mask(matcher, drafts, None)
        assert all(allowed)
        assert bits(mask)[-1] == after(compiled, [*output, *drafts])


def test_what_is_emitted_against_the_grammar_is_a_fault(grammar: Callable[..., Grammar], tokenizer: Tokenizer) -> None:
    matcher = Matcher(grammar(regex="ab"))
    matcher.advance(tokenizer.encode("ax"))
    assert matcher.fault is not None
    assert "does not allow token" in matcher.fault
    assert num_valid(matcher, tokenizer.encode("b")) == 0
    mask, _ = block_mask(matcher, [5], None)
    assert all(bits(mask)[0]), "some token must be drawn, though nobody will see it"


def test_tokens_past_the_end_are_ignored(grammar: Callable[..., Grammar], tokenizer: Tokenizer) -> None:
    matcher = Matcher(grammar(regex="ab"))
    matcher.advance([*tokenizer.encode("ab"), EOS, 7, EOS])
    assert matcher.has_ended
    assert matcher.fault is None
    mask, allowed = block_mask(matcher, [EOS], None)
    assert allowed == [False]
    assert bits(mask)[0].index(True) == EOS
    assert bits(mask)[0].count(True) == 1, "a step in flight can only draw the end again"


def test_masks_of_any_id_reach_logits_of_any_width() -> None:
    mask = torch.zeros(1, 2, dtype=torch.int32)
    mask[0, 0], mask[0, 1] = -(2**31), 1  # ids 31 and 32
    for width in (33, 64, 70):
        logits = torch.zeros(1, width)
        forbid(logits, mask)
        assert torch.isfinite(logits)[0].nonzero().flatten().tolist() == [31, 32]


def test_drafters_see_the_mask_behind_their_own_drafts(grammar: Callable[..., Grammar], tokenizer: Tokenizer) -> None:
    compiled = grammar(regex="ab?")
    (a,) = tokenizer.encode("a")
    masks = DraftMasks({1: Matcher(compiled)}, 3, device=CPU)
    first = masks(0)
    assert first is not None
    assert first.shape == (3, VOCAB_SIZE)
    assert first[0].all()
    assert first[2].all()
    assert first[1].tolist() == after(compiled, [])
    behind = masks(1, {0: [5], 1: [a]})
    assert behind is not None
    assert behind[1].tolist() == after(compiled, [a])
    assert behind[0].all()
    assert masks(1) is None, "without the drafts nothing is known past the anchor"
    refused = masks(1, {1: [EOS]})
    assert refused is not None
    assert refused[1].all(), "verification refuses what follows a draft that is not allowed"
