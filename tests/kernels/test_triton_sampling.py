"""The Triton column of uniforms, laws and samples against the reference. Both sides see the same float32 logits and bits.

Tolerances: a law is float32 on one side and float64 on the other, so 2e-6 relative to its largest entry. An id may differ only where
u lies within 1e-6 of a step of the CDF; everywhere else it is equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec.kernels.philox import PURPOSE_ACCEPT, PURPOSE_TARGET
from specdec.kernels.philox import uniform as torch_uniform
from specdec.kernels.reference import sample as reference_sample
from specdec.kernels.reference import target_law as reference_law

Call = Callable[..., Any]
EDGE = 1e-6


def settings(rows: int, seed: int) -> dict[str, torch.Tensor]:
    """Per-row parameters that mix greedy, plain, and every cut."""
    table = [(1.0, 0, 1.0, 0.0), (0.7, 5, 0.9, 0.0), (0.0, 3, 0.5, 0.2), (1.3, -1, 0.6, 0.01), (1e-6, 0, 1.0, 0.0), (0.9, 40, 1.0, 0.3)]
    chosen = [table[(row + seed) % len(table)] for row in range(rows)]
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*chosen, strict=True)) if rows else ([], [], [], [])
    return {
        "temperature": torch.tensor(temperature, dtype=torch.float32),
        "top_k": torch.tensor(top_k, dtype=torch.int64),
        "top_p": torch.tensor(top_p, dtype=torch.float32),
        "min_p": torch.tensor(min_p, dtype=torch.float32),
    }


def logits_of(rows: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def same_ids(ids: torch.Tensor, law: torch.Tensor, u: torch.Tensor) -> bool:
    """Equal to the reference's draw, or u is at a step of the CDF and the id is its neighbour there."""
    expected = reference_sample(law, u)
    for row in (ids != expected).nonzero().flatten().tolist():
        cumulative = law[row].cumsum(0) / law[row].sum()
        steps = cumulative[torch.tensor([int(ids[row]), int(expected[row])])]
        if float((steps - u[row].double()).abs().min()) > EDGE or float(law[row, int(ids[row])]) == 0.0:
            return False
    return True


def test_uniforms_have_the_same_bits(triton_call: Call) -> None:
    generator = torch.Generator().manual_seed(0)
    seed = torch.randint(-(2**63), 2**63 - 1, (777,), generator=generator)
    position = torch.randint(0, 2**40, (777,), generator=generator)
    index = torch.arange(777) % 9
    for given in (index, 4):
        ours = triton_call("uniform", seed, position, purpose=PURPOSE_ACCEPT, index=given)
        assert torch.equal(ours, torch_uniform(seed, position, purpose=PURPOSE_ACCEPT, index=given))


@pytest.mark.parametrize(("rows", "vocab"), [(0, 97), (1, 1), (6, 97), (6, 1000), (2, 5000)])
def test_laws_and_samples_match(triton_call: Call, rows: int, vocab: int) -> None:
    logits, given = logits_of(rows, vocab, seed=vocab), settings(rows, seed=vocab)
    u = torch_uniform(torch.arange(rows), torch.arange(rows), purpose=PURPOSE_TARGET)
    law = reference_law(logits, **given)
    ours = triton_call("target_law", logits, **given)
    assert ours.shape == law.shape
    assert torch.equal(ours > 0, law > 0)
    assert torch.allclose(ours.double(), law, rtol=2e-6, atol=1e-9)
    assert same_ids(triton_call("sample_logits", logits, u, **given), law, u)
    assert same_ids(triton_call("sample", law.float(), u), law.float().double(), u)


@pytest.mark.parametrize("vocab", [49152, pytest.param(151936, marks=pytest.mark.slow)])
def test_large_vocabularies_match(triton_call: Call, vocab: int) -> None:
    """One row with top-k and top-p, so that every search runs over the whole vocabulary."""
    logits, given = logits_of(1, vocab, seed=1), settings(1, seed=1)
    u = torch.tensor([0.37])
    law = reference_law(logits, **given)
    assert int((law > 0).sum()) > 1
    assert same_ids(triton_call("sample_logits", logits, u, **given), law, u)


def test_masked_broken_and_empty_rows(triton_call: Call) -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [
            [-inf, -inf, -inf, -inf, -inf],  # nothing possible: law zero, sample -1
            [nan, nan, inf, -inf, nan],  # the same after cleaning
            [-inf, 1.0, -inf, nan, -inf],  # one possible id, whatever u
            [inf, 0.0, 5.0, nan, 5.0],  # greedy with a tie: the lowest id
            [-0.0, 0.0, -inf, 0.0, -0.0],  # signed zeros are ties
        ]
    )
    given = settings(5, seed=0) | {"temperature": torch.tensor([1.0, 0.0, 0.7, 0.0, 1.0]), "top_k": torch.tensor([0, 0, 0, 0, 1])}
    given |= {"top_p": torch.ones(5), "min_p": torch.zeros(5)}
    u = torch.tensor([0.5, 0.5, 0.999, 0.9, 0.99])
    law = triton_call("target_law", logits, **given)
    assert torch.equal(law > 0, reference_law(logits, **given) > 0)
    assert law[:2].sum() == 0
    assert triton_call("sample_logits", logits, u, **given).tolist() == [-1, -1, 1, 2, 4]
    assert triton_call("sample", law, u).tolist() == [-1, -1, 1, 2, 4]
    assert reference_sample(reference_law(logits, **given), u).tolist() == [-1, -1, 1, 2, 4]


def test_ties_at_each_border_are_kept(triton_call: Call) -> None:
    logits = torch.log(torch.tensor([[0.3, 0.2, 0.2, 0.2, 0.1]]))
    one = {"temperature": torch.ones(1), "top_k": torch.zeros(1, dtype=torch.int64), "top_p": torch.ones(1), "min_p": torch.zeros(1)}
    for changed in ({"top_k": torch.tensor([2])}, {"top_p": torch.tensor([0.45])}, {"min_p": torch.tensor([0.6])}):
        for law in (triton_call("target_law", logits, **(one | changed)), reference_law(logits, **(one | changed))):
            assert (law[0] > 0).tolist() == [True, True, True, True, False]


def test_cuts_work_in_order_and_each_one_renormalises() -> None:
    """top-k leaves (.4, .3), so the first id holds .571 of what is left and reaches top-p .55 alone; of the full law it holds .4."""
    law = torch.tensor([0.4, 0.3, 0.2, 0.1])
    given = {"temperature": torch.ones(1), "top_k": torch.tensor([2]), "top_p": torch.tensor([0.55]), "min_p": torch.zeros(1)}
    cut = reference_law(law.log()[None], **given)[0]
    assert cut.tolist() == pytest.approx([1.0, 0, 0, 0])


def test_temperature_comes_before_the_cuts() -> None:
    law = torch.tensor([0.5, 0.3, 0.2])
    given = {
        "temperature": torch.tensor([0.5]),
        "top_k": torch.zeros(1, dtype=torch.int64),
        "top_p": torch.tensor([0.6]),
        "min_p": torch.zeros(1),
    }
    cut = reference_law(law.log()[None], **given)[0]
    assert (cut > 0).tolist() == [True, False, False]  # squares: .25 of .38 is .66; before temperature .5 would not reach .6


def test_a_row_does_not_depend_on_its_neighbours(triton_call: Call) -> None:
    logits, given = logits_of(5, 300, seed=9), settings(5, seed=3)
    u = torch.linspace(0.1, 0.9, 5)
    together = triton_call("sample_logits", logits, u, **given)
    order = torch.tensor([3, 0, 4, 2, 1])
    permuted = triton_call("sample_logits", logits[order].contiguous(), u[order], **{key: value[order] for key, value in given.items()})
    assert torch.equal(permuted, together[order])


def test_half_precision_logits_are_read_as_they_are(triton_call: Call) -> None:
    logits, given = logits_of(4, 333, seed=2).bfloat16(), settings(4, seed=1)
    u = torch.linspace(0.05, 0.95, 4)
    assert same_ids(triton_call("sample_logits", logits, u, **given), reference_law(logits, **given), u)


def test_the_smallest_and_largest_coin_stay_inside_the_support() -> None:
    mass = torch.zeros(2, 50)
    mass[:, 10:40] = 1.0
    assert reference_sample(mass, torch.tensor([2.0**-24, 1 - 2.0**-24])).tolist() == [10, 39]


def test_the_extreme_coins_stay_inside_the_support_in_triton(triton_call: Call) -> None:
    mass = torch.zeros(2, 5000)
    mass[:, 10:4990] = torch.rand(2, 4980, generator=torch.Generator().manual_seed(0))
    ids = triton_call("sample", mass, torch.tensor([2.0**-24, 1 - 2.0**-24]))
    assert ids[0] == 10
    assert ids[1] == 4989


def test_wrappers_refuse_what_they_cannot_launch() -> None:
    pytest.importorskip("triton")
    from specdec.kernels.sample import sample, target_law

    given = settings(2, seed=0)
    with pytest.raises(ValueError, match=r"top_k has dtype torch\.int32"):
        target_law(torch.zeros(2, 5), **(given | {"top_k": given["top_k"].int()}))
    with pytest.raises(ValueError, match=r"u has shape \(3,\), but it must be \(2,\)"):
        sample(torch.zeros(2, 5), torch.zeros(3))
    with pytest.raises(ValueError, match="must be contiguous"):
        sample(torch.zeros(5, 2).T, torch.zeros(2))
