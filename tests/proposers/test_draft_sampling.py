"""How drafts are drawn: the law that is kept is the one that was drawn from, noise has the right name, grammars hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.kernels import reference
from specdec.kernels.philox import PURPOSE_DRAFT, PURPOSE_TARGET, uniform
from specdec.proposers.base import Dense, DraftSampling
from specdec.proposers.draft_sampling import ChainDraws, draw_drafts

COUNT, VOCAB = 6, 40


def sampling(**changes: Any) -> DraftSampling:
    index = torch.arange(COUNT)
    given: dict[str, Any] = {
        "temperature": torch.tensor([0.8, 0.0, 1.3])[index % 3],
        "seed": index * 1_000_003 - 7,
        "top_k": torch.tensor([0, 5])[index % 2],
        "top_p": torch.tensor([1.0, 0.9])[index % 2],
    }
    return DraftSampling(**given | changes)


def logits(seed: int = 0, count: int = COUNT) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def law_of(rows: torch.Tensor, how: DraftSampling, requests: torch.Tensor) -> torch.Tensor:
    return reference.target_law(
        rows,
        temperature=how.temperature[requests],
        top_k=how.top_k[requests],
        top_p=how.top_p[requests],
        min_p=torch.zeros(len(requests)),
    )


def test_the_kept_law_is_the_one_that_was_drawn_from() -> None:
    requests, anchors = torch.tensor([4, 0, 1, 5]), torch.tensor([9, 30, 2, 4])
    rows = logits(count=4)
    drawn = draw_drafts(rows, sampling(), requests=requests, anchors=anchors, index=2, method="probabilistic")
    law = law_of(rows, sampling(), requests)
    assert drawn.logits is not None
    assert torch.allclose(drawn.logits.softmax(-1).double(), law, atol=1e-6)
    u = uniform(sampling().seed[requests], anchors, purpose=PURPOSE_DRAFT, index=2)
    assert torch.equal(drawn.ids, reference.sample(law, u))


def test_coupled_drafts_are_the_targets_own_draws_of_equal_laws() -> None:
    requests, anchors = torch.arange(COUNT), torch.arange(COUNT) + 20
    rows = logits()
    drawn = draw_drafts(rows, sampling(), requests=requests, anchors=anchors, index=3, method="coupled")
    u = uniform(sampling().seed, anchors + 3, purpose=PURPOSE_TARGET)
    assert drawn.logits is None
    assert torch.equal(drawn.ids, reference.sample(law_of(rows, sampling(), requests), u))


def test_greedy_drafts_are_certain_whatever_the_temperature() -> None:
    rows = logits()
    drawn = draw_drafts(rows, sampling(), requests=torch.arange(COUNT), anchors=torch.arange(COUNT), index=0, method="greedy")
    assert drawn.logits is None
    assert torch.equal(drawn.ids, rows.argmax(-1))


def test_sampled_noise_is_named_by_anchor_and_index_and_coupled_noise_by_position() -> None:
    """Draft 1 after anchor 9 and draft 0 after anchor 10 lie at one position."""
    how = sampling(temperature=torch.full((COUNT,), 50.0), top_k=torch.zeros(COUNT, dtype=torch.int64), top_p=torch.ones(COUNT))
    rows, requests = logits(), torch.arange(COUNT)

    def ids(method: Any, anchor: int, index: int) -> list[int]:
        anchors = torch.full((COUNT,), anchor)
        return draw_drafts(rows, how, requests=requests, anchors=anchors, index=index, method=method).ids.tolist()

    assert ids("coupled", 9, 1) == ids("coupled", 10, 0)
    assert ids("probabilistic", 9, 1) != ids("probabilistic", 10, 0)
    assert ids("probabilistic", 9, 1) != ids("probabilistic", 9, 0)
    assert ids("probabilistic", 9, 1) == ids("probabilistic", 9, 1)


@pytest.mark.parametrize("method", ["greedy", "probabilistic", "coupled"])
def test_what_the_grammar_forbids_is_not_drawn(method: Any) -> None:
    asked = []

    def token_mask(depth: int, paths: Any = None) -> torch.Tensor:
        asked.append((depth, {request: list(path) for request, path in paths.items()}))
        mask = torch.ones(COUNT, VOCAB - 2, dtype=torch.bool)  # its vocabulary is smaller than the draft's
        mask[0] = False
        mask[0, [3, 7]] = True
        mask[2] = False  # nothing at all
        return mask

    draws = ChainDraws(sampling(token_mask=token_mask), {0: 5, 2: 6, 3: 7}, method=method)
    for _ in range(3):
        draws.draw([0, 2, 3], logits(count=3))
    assert set(draws.tokens[0]) <= {3, 7}
    assert draws.tokens[2] == [-1] * 3
    assert all(0 <= token < VOCAB - 2 for token in draws.tokens[3])
    assert [depth for depth, _ in asked] == [0, 1, 2]
    assert asked[2][1] == {0: draws.tokens[0][:2], 3: draws.tokens[3][:2]}
    assert draws.newest([0, 2]) == [draws.tokens[0][2], 0]


def test_a_batch_holds_uneven_chains_with_their_laws() -> None:
    id_map = torch.arange(VOCAB) * 2
    draws = ChainDraws(sampling(), {1: 5, 3: 6}, method="probabilistic")
    draws.draw([1, 3], logits(1, 2))
    draws.draw([3], logits(2, 1))
    batch = draws.batch(COUNT, source="mine", id_map=id_map)
    assert batch.num_nodes.tolist() == [0, 1, 0, 2, 0, 0]
    assert batch.source == ["", "mine", "", "mine", "", ""]
    assert batch.token_ids[3].tolist() == [2 * token for token in draws.tokens[3]]
    assert batch.token_ids[1].tolist() == [2 * draws.tokens[1][0], -1]
    assert batch.law is not None
    assert batch.law.one_hot.tolist() == [False, True, False, False, True, False]  # greedy requests
    assert isinstance(batch.law.rows, Dense)
    law = law_of(logits(2, 1), sampling(), torch.tensor([3]))
    assert torch.allclose(batch.law.rows.logits[3, 1].softmax(-1).double(), law[0], atol=1e-6)
    assert batch.law.rows.id_map is id_map


def test_certain_chains_carry_no_law() -> None:
    draws = ChainDraws(sampling(), {0: 5}, method="coupled")
    draws.draw([0], logits(count=1))
    assert draws.batch(COUNT, source="mine").law is None
    assert ChainDraws(sampling(), {}, method="probabilistic").batch(2, source="mine").token_ids.shape == (2, 0)
