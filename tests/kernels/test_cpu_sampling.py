"""Both ways CPUs sample, compiled rows and plain torch, against the reference: odd widths, broken rows, cuts on ties."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specdec.kernels import reference
from specdec.kernels.cpu import sampling, torch_sampling

Law = Callable[..., torch.Tensor]
LAWS = {"compiled": sampling.target_probs, "torch": torch_sampling.target_probs}
DRAWS = {"compiled": sampling.sample_logits, "torch": torch_sampling.sample_logits}


def random_rows(vocab: int, *, count: int = 24, spread: float = 3.0) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    index = torch.arange(count)
    given = {
        "temperature": torch.tensor([0.8, 0.0, 1.0, 0.3, 2.0])[index % 5],
        "top_k": torch.tensor([0, 1, 7, 0, -1, 10**6])[index % 6],
        "top_p": torch.tensor([0.95, 1.0, 0.3, 0.999])[index % 4],
        "min_p": torch.tensor([0.0, 0.0, 0.05])[index % 3],
    }
    return torch.randn(count, vocab, generator=generator) * spread, given, torch.rand(count, generator=generator)


def assert_matches(way: str, logits: torch.Tensor, given: dict[str, torch.Tensor], u: torch.Tensor) -> None:
    expected = reference.target_law(logits, **given)
    law = LAWS[way](logits.clone(), **given)
    assert torch.equal(law > 0, expected > 1e-30)
    assert torch.allclose(law.double(), expected, rtol=2e-5, atol=1e-9)
    assert torch.equal(DRAWS[way](logits.clone(), u, **given), reference.sample(expected, u))


def test_an_openmp_runtime_is_found_here() -> None:
    """Otherwise the compiled half of this file tests the fallback twice."""
    assert sampling._compiled() is not None


@pytest.mark.parametrize("way", LAWS)
@pytest.mark.parametrize("vocab", [1, 2, 97, 511, 512, 513, 4999])
def test_laws_and_draws_match_the_reference(way: str, vocab: int) -> None:
    assert_matches(way, *random_rows(vocab))


@pytest.mark.parametrize("way", LAWS)
def test_broken_rows(way: str) -> None:
    logits, given, u = random_rows(700)
    logits[0] = -torch.inf
    logits[1] = torch.nan
    logits[2, ::2] = -torch.inf
    logits[3, 600] = torch.inf
    logits[4, 5] = torch.nan
    logits[5, 3:] = -torch.inf
    given["temperature"][:2] = 1.0
    assert_matches(way, logits, given, u)
    assert DRAWS[way](logits, u, **given)[:2].tolist() == [-1, -1]


@pytest.mark.parametrize("way", LAWS)
def test_ties_at_a_cut_stay_and_the_lowest_id_wins_a_greedy_tie(way: str) -> None:
    logits = torch.full((4, 1500), -4.0)
    logits[:, [40, 700, 1400]] = 2.0
    logits[3, 30] = -0.0
    logits[3, [40, 700, 1400]] = 0.0  # -0 and 0 are one value
    given = {
        "temperature": torch.tensor([1.0, 1.0, 0.0, 0.0]),
        "top_k": torch.tensor([2, 0, 0, 0]),
        "top_p": torch.tensor([1.0, 0.2, 1.0, 1.0]),
        "min_p": torch.zeros(4),
    }
    law = LAWS[way](logits, **given)
    third = torch.tensor(1 / 3)
    assert torch.allclose(law[:2][:, [40, 700, 1400]], third)
    assert torch.allclose(law[:2].sum(-1), torch.ones(2))
    assert DRAWS[way](logits, torch.full((4,), 0.5), **given).tolist() == [700, 700, 40, 30]


@pytest.mark.parametrize("way", DRAWS)
def test_the_smallest_and_largest_coin_find_a_token_of_the_nucleus(way: str) -> None:
    logits, given, _ = random_rows(3000)
    law = reference.target_law(logits, **given)
    for coin in (2.0**-24, 1 - 2.0**-24):
        ids = DRAWS[way](logits, torch.full((len(logits),), coin), **given)
        assert bool((law.gather(1, ids[:, None]) > 0).all())


def test_rows_that_are_not_whole_or_not_float32_are_served_too() -> None:
    logits, given, u = random_rows(300)
    expected = sampling.sample_logits(logits, u, **given)
    wide = torch.full((len(logits), 400), 99.0)
    wide[:, :300] = logits
    assert torch.equal(sampling.sample_logits(wide[:, :300], u, **given), expected)
    assert torch.equal(sampling.sample_logits(logits.T.contiguous().T, u, **given), expected)
    assert torch.equal(sampling.sample_logits(logits.double(), u, **given), expected)
    assert sampling.sample_logits(logits[:0], u[:0], **{name: value[:0] for name, value in given.items()}).shape == (0,)


def test_parameters_of_other_rows_are_refused() -> None:
    logits, given, u = random_rows(50)
    with pytest.raises(ValueError, match=r"top_p has shape \(3,\), but there are 24 rows: give one entry per row"):
        sampling.sample_logits(logits, u, **given | {"top_p": torch.ones(3)})
