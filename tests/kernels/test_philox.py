"""Philox: published vectors, ranges, and the same bits from every form of the function."""

from __future__ import annotations

import pytest
import torch

from specdec.kernels.philox import PURPOSE_ACCEPT, PURPOSE_RESIDUAL, PURPOSE_TARGET, philox4x32, uniform, uniform64

# Known answers that the authors of Philox publish with Random123: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_published_vectors_hold(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...], form: str) -> None:
    words = [torch.tensor([word], dtype=torch.int64) for word in counter + key]
    out = philox4x32(*(word.numpy() if form == "numpy" else word for word in words))
    assert tuple(int(word[0]) for word in out) == expected


def test_uniforms_stay_strictly_inside_the_unit_interval_and_look_uniform() -> None:
    seed = torch.full((200_000,), 7, dtype=torch.int64)
    u = uniform(seed, torch.arange(200_000), purpose=PURPOSE_TARGET)
    assert u.dtype == torch.float32
    assert u.min() >= 2.0**-24
    assert u.max() <= 1 - 2.0**-24
    counts = torch.histc(u, bins=64, min=0, max=1)
    expected = len(u) / 64
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 125  # 63 degrees of freedom: P(> 125) is about 5e-6


def test_extreme_words_do_not_reach_zero_or_one() -> None:
    top = ((0xFFFFFFFF >> 9) * 2 + 1) * 2.0**-24
    assert torch.tensor(top, dtype=torch.float32) == 1 - 2.0**-24 < 1


def test_the_fine_uniform_refines_the_coarse_one() -> None:
    seed, position = torch.arange(1000), torch.arange(1000) * 3
    coarse = uniform(seed, position, purpose=PURPOSE_ACCEPT, index=2).double()
    fine = uniform64(seed, position, purpose=PURPOSE_ACCEPT, index=2)
    assert (coarse - fine).abs().max() <= 2.0**-24
    assert fine.min() > 0
    assert fine.max() < 1


def test_every_part_of_the_name_changes_the_draw() -> None:
    def draw(seed: int, position: int, purpose: int, index: int) -> float:
        return float(uniform(torch.tensor([seed]), torch.tensor([position]), purpose=purpose, index=index))

    base = draw(1, 2, PURPOSE_TARGET, 0)
    others = [
        draw(2, 2, PURPOSE_TARGET, 0),
        draw(1 + 2**32, 2, PURPOSE_TARGET, 0),
        draw(-1, 2, PURPOSE_TARGET, 0),
        draw(1, 3, PURPOSE_TARGET, 0),
        draw(1, 2 + 2**32, PURPOSE_TARGET, 0),
        draw(1, 2, PURPOSE_RESIDUAL, 0),
        draw(1, 2, PURPOSE_TARGET, 1),
    ]
    assert len({base, *others}) == 8


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    seed, position, index = torch.arange(50) - 25, torch.arange(50) * 2**30, torch.arange(50)
    together = uniform(seed, position, purpose=PURPOSE_ACCEPT, index=index)
    for row in range(0, 50, 7):
        alone = uniform(seed[row : row + 1], position[row : row + 1], purpose=PURPOSE_ACCEPT, index=int(index[row]))
        assert alone[0] == together[row]


def test_an_empty_batch_gives_no_draws() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert uniform(empty, empty, purpose=PURPOSE_TARGET).shape == (0,)


def test_bad_input_names_the_field() -> None:
    good = torch.arange(3)
    with pytest.raises(ValueError, match=r"seed has dtype torch\.int32"):
        uniform(good.int(), good, purpose=PURPOSE_TARGET)
    with pytest.raises(ValueError, match=r"position has shape \(2,\)"):
        uniform(good, good[:2], purpose=PURPOSE_TARGET)
    with pytest.raises(ValueError, match="index is -1"):
        uniform(good, good, purpose=PURPOSE_TARGET, index=-1)
