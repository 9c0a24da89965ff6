"""The statistics behind verify: known values, uniformity under the law, and sensitivity to laws that are a little off."""

from __future__ import annotations

import math

import pytest
import torch

from specdec.kernels.reference import target_law
from specdec.sampling_params import SamplingParams
from specdec.tools import tv
from specdec.tools.pit import Transformed, pit_checks, transform
from specdec.tools.scoring import penalised, processed_law
from specdec.tools.significance import chi_square_sf, holm, kolmogorov_sf, normal_two_sided, normal_upper, uniform_bins, uniform_gap

VOCAB = 12


@pytest.mark.parametrize(
    ("statistic", "df", "p_value"),
    [(3.841459, 1, 0.05), (30.143527, 19, 0.05), (36.190869, 19, 0.01), (43.820196, 19, 0.001), (18.337653, 19, 0.5), (0.0, 19, 1.0)],
)
def test_chi_square_tail(statistic: float, df: int, p_value: float) -> None:
    assert chi_square_sf(statistic, df) == pytest.approx(p_value, rel=1e-4)


@pytest.mark.parametrize(("z", "p_value"), [(0.0, 1.0), (1.959964, 0.05), (-2.575829, 0.01), (5.0, 5.733031e-7), (10.0, 1.523971e-23)])
def test_normal_tail(z: float, p_value: float) -> None:
    assert normal_two_sided(z) == pytest.approx(p_value, rel=1e-4)
    assert normal_upper(abs(z)) == pytest.approx(p_value / 2, rel=1e-4)


@pytest.mark.parametrize(("scaled", "p_value"), [(1.22385, 0.1), (1.35810, 0.05), (1.62762, 0.01), (1.94947, 0.001), (0.82757, 0.5)])
def test_kolmogorov_tail(scaled: float, p_value: float) -> None:
    """The limit law's quantiles; the correction of Stephens vanishes for many observations."""
    num = 10**8
    assert kolmogorov_sf(scaled / (math.sqrt(num) + 0.12), num) == pytest.approx(p_value, rel=2e-3)


def test_both_forms_of_the_kolmogorov_series_meet() -> None:
    below, above = (kolmogorov_sf(scaled / (1e4 + 0.12), 10**8) for scaled in (0.99999, 1.00001))
    assert below == pytest.approx(above, rel=1e-4)
    assert kolmogorov_sf(0.0, 100) == 1.0
    assert kolmogorov_sf(1.0, 100) < 1e-60


def test_kolmogorov_of_few_observations() -> None:
    """Exact 5% point for n = 20 is 0.29408; Stephens' correction is good to a few per cent there."""
    assert kolmogorov_sf(0.29408, 20) == pytest.approx(0.05, rel=0.05)


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
    assert holm([], 0.05) == []
    assert holm([0.9, 0.0], 0.05) == [False, True]


def test_uniform_values_pass_and_others_fail() -> None:
    u = torch.rand(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert uniform_bins(u, "u").p_value > 0.01
    assert uniform_gap(u, "u").p_value > 0.01
    assert uniform_bins(u**1.2, "u").p_value < 1e-6
    assert uniform_gap(u**1.2, "u").p_value < 1e-6


def some_law(count: int, *, seed: int) -> torch.Tensor:
    logits = 1.5 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed))
    return torch.softmax(logits.double(), -1)


def texts_of(laws: torch.Tensor, drawn_from: torch.Tensor, *, length: int = 50) -> list[Transformed]:
    """Tokens drawn from one law, transformed with another."""
    generator = torch.Generator().manual_seed(1)
    tokens = drawn_from.multinomial(1, generator=generator).squeeze(1)
    texts = []
    for start in range(0, len(laws), length):
        part = slice(start, start + length)
        count = len(laws[part])
        slots = [i % 3 for i in range(count)]
        texts.append(transform([(0, laws[part])], tokens[part].tolist(), slots, generator=generator))
    return texts


def test_tokens_of_the_law_pass_every_check() -> None:
    laws = some_law(6000, seed=0)
    checks = pit_checks(texts_of(laws, laws), by_slot=True)
    assert [check.name for check in checks] == ["bins", "largest gap", "surprise", "neighbours", "pairs", "slot 0", "slot 1", "slot 2"]
    assert all(check.p_value > 1e-3 for check in checks), checks
    assert len(pit_checks(texts_of(laws, laws), by_slot=False)) == 5


@pytest.mark.parametrize("temperature", [0.9, 1.1])
def test_a_wrong_temperature_is_a_surprise(temperature: float) -> None:
    laws = some_law(6000, seed=0)
    other = laws ** (1 / temperature)
    checks = {check.name: check for check in pit_checks(texts_of(laws, other / other.sum(-1, keepdim=True)), by_slot=False)}
    assert checks["surprise"].p_value < 1e-8
    assert math.copysign(1, checks["surprise"].statistic) == math.copysign(1, temperature - 1)


def test_repeating_uniforms_are_neighbours() -> None:
    """Each value alone is uniform; only the pairs are not."""
    u = torch.rand(3000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).repeat_interleave(2)
    zero = torch.zeros_like(u)
    checks = {check.name: check for check in pit_checks([Transformed(u, zero, zero + 1, zero.long(), 0)], by_slot=False)}
    assert checks["neighbours"].p_value < 1e-12
    assert checks["surprise"].p_value == 1.0


def test_pairs_see_what_cancels_in_single_tokens_and_in_correlations() -> None:
    """The second of each pair is uniform, and not correlated with the first; it only leans towards the middle or away from it."""
    generator = torch.Generator().manual_seed(0)
    first, other = torch.rand(2, 3000, dtype=torch.float64, generator=generator)
    middle = 0.25 + other / 2
    second = torch.where((first - 0.5).abs() < 0.25, middle, torch.where(other < 0.5, other / 2, 0.5 + other / 2))
    u = torch.stack([first, second], 1).flatten()
    zero = torch.zeros_like(u)
    checks = {check.name: check for check in pit_checks([Transformed(u, zero, zero + 1, zero.long(), 0)], by_slot=False)}
    assert checks["pairs"].p_value < 1e-12
    assert min(checks[name].p_value for name in ("bins", "neighbours", "largest gap")) > 1e-3
    assert checks["pairs"].num == 3000


def test_tokens_without_probability_are_counted() -> None:
    law = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.0, 0.75]], dtype=torch.float64)
    text = transform([(0, law)], [2, 0], [0, 0], generator=torch.Generator().manual_seed(0))
    assert text.outside == 1
    assert 0.999 < float(text.u[0]) < 1
    assert 0.75 < float(text.u[1]) < 1
    assert torch.isfinite(text.surprise).all()


def test_equal_probabilities_are_ordered_by_id() -> None:
    law = torch.full((3, 4), 0.25, dtype=torch.float64)
    text = transform([(0, law[:2]), (2, law[2:])], [0, 3, 1], [0, 0, 0], generator=torch.Generator().manual_seed(0))
    assert [int(u * 4) for u in text.u.tolist()] == [0, 3, 1]
    assert text.surprise.abs().max() < 1e-12
    assert text.variance.max() < 1e-12


def test_penalties_of_the_prompt_and_of_the_output() -> None:
    sampling = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    logits = torch.tensor([2.0, 2.0, -2.0, 2.0], dtype=torch.float64)
    row = penalised(logits, sampling, prompt=[0, 2], output=[1, 1])
    assert row.tolist() == [1.0, 1.0 - 0.5 - 0.5, -4.0, 2.0]


def test_the_processed_law_is_the_reference_law_of_penalised_rows() -> None:
    sampling = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.02, presence_penalty=1.0)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[1, 4] = logits[1, 7]  # a tie, perhaps at the border of top-k
    laws = processed_law(logits, sampling, prompt=[1], output=[4, 4, 2], first=0)
    rows = logits.double().clone()
    rows[1:, 4] -= 1.0
    expected = target_law(
        rows,
        temperature=torch.full((3,), 0.7),
        top_k=torch.full((3,), 5),
        top_p=torch.full((3,), 0.9),
        min_p=torch.full((3,), 0.02),
    )
    assert torch.allclose(laws, expected, atol=1e-12)


def short_texts(law: torch.Tensor, *, prompts: int, count: int, seed: int) -> list[list[tuple[int, ...]]]:
    generator = torch.Generator().manual_seed(seed)
    return [[(int(x),) for x in law.multinomial(count, replacement=True, generator=generator)] for _ in range(prompts)]


def test_total_variation_of_equal_laws_is_at_the_floor() -> None:
    law = some_law(1, seed=3)[0]
    samples = [short_texts(law, prompts=4, count=300, seed=seed) for seed in range(3)]
    variation = tv.compare(*samples, seed=0)
    expected_floor = float(law.sqrt().sum()) / math.sqrt(math.pi * 300)
    assert variation.floor == pytest.approx(expected_floor, rel=0.3)
    assert variation.observed == pytest.approx(expected_floor, rel=0.3)
    assert variation.permutation_p > 0.01
    assert variation.check.p_value > 0.01


def test_total_variation_of_other_laws_is_above_it() -> None:
    law = some_law(1, seed=3)[0]
    other = 0.8 * law + 0.2 * some_law(1, seed=4)[0]
    plain, again = (short_texts(law, prompts=4, count=300, seed=seed) for seed in (0, 1))
    variation = tv.compare(plain, again, short_texts(other, prompts=4, count=300, seed=2), seed=0)
    assert variation.permutation_p == 1 / (tv.PERMUTATIONS + 1)
    assert variation.check.p_value < 1e-5


def test_texts_that_occur_once_do_not_tell_the_samples_apart() -> None:
    """More different texts than symbols: which of them share one symbol may not depend on the sample they came from."""
    generator = torch.Generator().manual_seed(0)
    plain, again, drafted = ([[(int(x),) for x in torch.randperm(10_000, generator=generator)[:300]] for _ in range(3)] for _ in range(3))
    assert tv.compare(plain, again, drafted, seed=0).permutation_p > 0.01


def test_identical_samples_have_no_variation() -> None:
    texts = [[(1, 2)] * 20]
    variation = tv.compare(texts, texts, texts, seed=0)
    assert (variation.observed, variation.floor, variation.permutation_p) == (0.0, 0.0, 1.0)
    assert variation.check.p_value == 0.5
