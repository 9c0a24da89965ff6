"""The served columns of every verification rule against the reference: all six fields equal, on ragged and broken batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from specdec.kernels.reference import sample as reference_sample
from specdec.kernels.verified import Verified

Call = Callable[..., Any]


def batch(num_drafts: Sequence[int], *, width: int, vocab: int, seed: int, likely: float = 0.7) -> dict[str, Any]:
    """Ragged chains; -1 drafts means a request that owns no logits row. Drafts are the target's mode with chance `likely`."""
    generator = torch.Generator().manual_seed(seed)
    rows = [max(n + 1, 0) for n in num_drafts]
    cu = torch.tensor([0, *torch.tensor(rows, dtype=torch.int64).cumsum(0).tolist()] if rows else [0], dtype=torch.int32)
    probs = torch.softmax(torch.randn(int(cu[-1]), vocab, generator=generator) * 2, dim=-1)
    drafts = torch.full((len(rows), width), -1, dtype=torch.int64)
    for request, count in enumerate(num_drafts):
        for i in range(max(count, 0)):
            mode = int(probs[int(cu[request]) + i].argmax())
            guess = int(torch.randint(vocab, (1,), generator=generator))
            drafts[request, i] = mode if float(torch.rand(1, generator=generator)) < likely else guess
    return {
        "target_probs": probs,
        "draft_token_ids": drafts,
        "cu_num_logits": cu,
        "seed": torch.arange(len(rows)) * 1_000_003 + seed,
        "position": torch.arange(len(rows)) * 17 + 5,
    }


def draft_law(given: dict[str, Any], layout: str, *, support: int, seed: int) -> dict[str, torch.Tensor]:
    """Draft logits over the vocabulary, over a shared subset, or over a set per row; each holds its draft."""
    generator = torch.Generator().manual_seed(seed)
    drafts, vocab = given["draft_token_ids"], given["target_probs"].shape[1]
    num_requests, width = drafts.shape
    one_hot = torch.arange(num_requests) % 3 == 2
    if layout == "vocabulary":
        logits = torch.randn(num_requests, width, vocab, generator=generator)
        logits.scatter_(2, drafts.clamp_min(0)[..., None], 2.5)
        return {"draft_logits": logits, "one_hot": one_hot}
    logits = torch.randn(num_requests, width, support, generator=generator)
    if layout == "shared":
        ids = torch.randperm(vocab, generator=generator)[:support]
        held = (drafts[..., None] == ids).any(-1)
        drafts[~held & (drafts >= 0)] = int(ids[0])  # a reduced vocabulary cannot draft what it lacks
        return {"draft_logits": logits, "draft_ids": ids, "one_hot": one_hot}
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:support] for _ in range(num_requests * width)]).view(
        num_requests, width, -1
    )
    for request in range(num_requests):
        for i in range(width):
            row, draft = ids[request, i], int(drafts[request, i])
            row[support - 1] = -1  # padding
            if draft >= 0 and draft not in row.tolist():
                row[i % (support - 1)] = draft
    return {"draft_logits": logits, "draft_ids": ids, "one_hot": one_hot}


def assert_same(ours: Verified, expected: Verified) -> None:
    for name, mine, theirs in zip(Verified._fields, ours, expected, strict=True):
        assert torch.equal(mine, theirs), f"{name}: {mine.tolist()} is not {theirs.tolist()}"


SHAPES = {
    "empty batch": ([], 3, 7),
    "one request": ([3], 3, 97),
    "no drafts at all": ([0, 0], 0, 11),
    "vocabulary of one": ([2, 0], 2, 1),
    "ragged": ([4, 0, 2, -1, 1, 4, 3], 4, 97),
    "wide": ([5, 5, 5], 5, 5000),
}
LAYOUTS = ["certain", "vocabulary", "shared", "per row"]
EXTRA = {"fly": {"window": 1, "entropy_threshold": 0.2}}


@pytest.mark.parametrize("rule", ["rejection_sample", "block_verify", "fly"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rules_match_for_certain_drafts(served_call: Call, reference_call: Call, rule: str, shape: str) -> None:
    given = batch(SHAPES[shape][0], width=SHAPES[shape][1], vocab=SHAPES[shape][2], seed=3) | EXTRA.get(rule, {})
    assert_same(served_call(rule, **given), reference_call(rule, **given))


@pytest.mark.parametrize("rule", ["rejection_sample", "block_verify", "fly"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_rules_match_for_every_draft_law(served_call: Call, reference_call: Call, rule: str, layout: str, seed: int) -> None:
    given = batch([4, 0, 2, -1, 1, 4, 3, 4, 4, 4], width=4, vocab=97, seed=seed)
    law = {} if layout == "certain" else draft_law(given, layout, support=23, seed=seed)
    assert_same(served_call(rule, **given, **law, **EXTRA.get(rule, {})), reference_call(rule, **given, **law, **EXTRA.get(rule, {})))


@pytest.mark.parametrize("rule", ["rejection_sample", "block_verify", "fly", "typical"])
def test_refused_drafts_and_rows_without_mass(served_call: Call, reference_call: Call, rule: str) -> None:
    given = batch([3, 3, 3, 3, 2], width=3, vocab=41, seed=8, likely=1.0)
    given["draft_token_ids"][0] = -1  # all refused: sample the target at the anchor
    given["draft_token_ids"][1, 1] = -1  # refused in the middle: nothing after it is tested
    given["target_probs"][int(given["cu_num_logits"][2])] = 0  # no mass at the anchor: the request fails
    given["target_probs"][int(given["cu_num_logits"][3]) + 3] = 0  # no mass at the bonus row: fails only if reached
    arguments = {key: value for key, value in given.items() if rule != "typical" or key not in ("seed", "position")} | EXTRA.get(rule, {})
    ours, expected = served_call(rule, **arguments), reference_call(rule, **arguments)
    assert_same(ours, expected)
    assert ours.num_sampled[0] == 1
    assert ours.num_invalid.tolist() == [3, 1, 0, 0, 0]
    assert ours.num_sampled[1] <= 2
    assert ours.num_sampled[2] == 0
    assert ours.token_ids[2].tolist() == [-1] * 4
    assert ours.num_rejected[2] == 3


@pytest.mark.parametrize("shape", SHAPES)
def test_typical_matches(served_call: Call, reference_call: Call, shape: str) -> None:
    given = batch(SHAPES[shape][0], width=SHAPES[shape][1], vocab=SHAPES[shape][2], seed=5)
    arguments = {key: given[key] for key in ("target_probs", "draft_token_ids", "cu_num_logits")}
    assert_same(served_call("typical", **arguments), reference_call("typical", **arguments))


@pytest.mark.parametrize("shape", SHAPES)
def test_synthetic_matches(served_call: Call, reference_call: Call, shape: str) -> None:
    given = batch(SHAPES[shape][0], width=SHAPES[shape][1], vocab=SHAPES[shape][2], seed=6)
    arguments = {key: given[key] for key in ("draft_token_ids", "cu_num_logits", "seed", "position")}
    targets = given["target_probs"].argmax(-1)
    if len(targets) > 9:
        targets[9] = -1  # a row without a sample
    arguments |= {"target_token_ids": targets, "rates": torch.linspace(0.9, 0.4, SHAPES[shape][1])}
    assert_same(served_call("synthetic", **arguments), reference_call("synthetic", **arguments))


@pytest.mark.parametrize("shape", SHAPES)
def test_coupled_chains_match(served_call: Call, reference_call: Call, shape: str) -> None:
    given = batch(SHAPES[shape][0], width=SHAPES[shape][1], vocab=SHAPES[shape][2], seed=7)
    targets = reference_sample(given["target_probs"], torch.linspace(0.05, 0.95, len(given["target_probs"])))
    if len(targets) > 9:
        targets[9] = -1
    arguments = {"draft_token_ids": given["draft_token_ids"], "cu_num_logits": given["cu_num_logits"]}
    assert_same(served_call("verify_coupled", targets, **arguments), reference_call("verify_coupled", targets, **arguments))


def test_coupled_trees_match_and_follow_the_right_child(served_call: Call, reference_call: Call) -> None:
    parents = torch.tensor([[-1, -1, 0, 1, 1, 3], [-1, 0, 0, 1, 2, 4], [-1, 0, 0, 0, 3, -1], [-1, -1, 1, -1, -1, -1]])
    drafts = torch.tensor([[5, 6, 7, 8, 9, 5], [5, 6, 7, 8, 8, 9], [1, 2, 2, 3, 4, -1], [3, -1, 4, -1, -1, -1]])
    cu = torch.tensor([0, 7, 14, 20, 24], dtype=torch.int32)
    targets = torch.tensor([6, 0, 8, 0, 5, 0, 1, 5, 7, 0, 8, 0, 9, 2, 1, 2, 3, 4, 0, 0, 4, 4, 4, 4])
    for max_depth in (None, 4):
        arguments = {"draft_token_ids": drafts, "cu_num_logits": cu, "parents": parents, "max_depth": max_depth}
        ours = served_call("verify_coupled", targets, **arguments)
        assert_same(ours, reference_call("verify_coupled", targets, **arguments))
        assert ours.token_ids[0, :4].tolist() == [6, 8, 5, 1]
        assert ours.path[0, :4].tolist() == [0, 2, 4, 6]
        assert ours.path[2, :4].tolist() == [0, 1, 2, -1]  # of equal siblings, the lowest index
        assert ours.num_sampled[3] == 1
        assert ours.num_invalid[3] == 1


def test_the_coins_are_named_by_seed_anchor_and_index(reference_call: Call) -> None:
    """The same draft under another seed or at another anchor meets another coin; the block rule needs the anchor in the name."""
    count = 300
    given = {
        "target_probs": torch.full((2 * count, 2), 0.5),
        "draft_token_ids": torch.zeros(count, 1, dtype=torch.int64),
        "cu_num_logits": torch.arange(0, 2 * count + 1, 2, dtype=torch.int32),
    }
    position, seed = torch.arange(count), torch.full((count,), 7)

    def accepted(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return reference_call("rejection_sample", **given, seed=seed, position=position).num_sampled - 1

    once = accepted(seed, position)
    assert torch.equal(once, accepted(seed, position))
    assert 100 < int(once.sum()) < 200  # 150 expected, standard deviation 8.7
    assert 100 < int((once != accepted(seed + 1, position)).sum()) < 200
    assert 100 < int((once != accepted(seed, position + count)).sum()) < 200


@pytest.mark.parametrize("rule", ["rejection_sample", "block_verify"])
def test_reference_draws_follow_the_exact_law(reference_call: Call, rule: str) -> None:
    """First emitted token of many requests with sampled drafts: chi-square against the target, 7 degrees of freedom."""
    count, vocab = 1500, 8
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.softmax(torch.randn(vocab, generator=generator), -1) for _ in range(2))
    drafts = torch.multinomial(q, count * 2, replacement=True, generator=generator).view(count, 2)
    given = {
        "target_probs": p.repeat(3 * count, 1),
        "draft_token_ids": drafts,
        "cu_num_logits": torch.arange(0, 3 * count + 1, 3, dtype=torch.int32),
        "seed": torch.full((count,), 11),
        "position": torch.arange(count),
        "draft_logits": q.log().repeat(count, 2, 1),
    }
    first = reference_call(rule, **given).token_ids[:, 0]
    counts, expected = torch.bincount(first, minlength=vocab), p * count
    assert float(((counts - expected) ** 2 / expected).sum()) < 40  # P(> 40) is about 1e-6


def test_bad_draft_laws_are_refused() -> None:
    pytest.importorskip("triton")
    from specdec.kernels.rejection_sample import rejection_sample

    given = batch([2], width=2, vocab=9, seed=0)
    with pytest.raises(ValueError, match="draft_ids was given without draft_logits"):
        rejection_sample(**given, draft_ids=torch.arange(9))
    with pytest.raises(ValueError, match=r"draft_logits has 4 entries a row, but target_probs has 9"):
        rejection_sample(**given, draft_logits=torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match=r"one_hot has dtype torch\.int64"):
        rejection_sample(**given, draft_logits=torch.zeros(1, 2, 9), one_hot=torch.zeros(1, dtype=torch.int64))
