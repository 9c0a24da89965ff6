"""The dispatcher: what it offers, what it refuses, and that the served CPU column means what the reference means."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec.kernels.dispatch import CPU, ENVIRONMENT, REFERENCE, TRITON, column_of, kernel, load
from specdec.kernels.philox import PURPOSE_TARGET, uniform

Call = Callable[..., Any]


def test_every_column_offers_every_operation() -> None:
    assert set(REFERENCE) == set(CPU) == set(TRITON)


@pytest.mark.parametrize("name", sorted(REFERENCE))
@pytest.mark.parametrize("column", ["cpu", "triton"])
def test_columns_share_signatures(name: str, column: str) -> None:
    if column == "triton":
        pytest.importorskip("triton")
    ours, expected = (inspect.signature(load(name, which)).parameters for which in (column, "reference"))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [(p.name, p.kind, p.default) for p in expected.values()]


def test_the_device_chooses_and_the_environment_may_ask_for_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert column_of(torch.device("cpu")) == "cpu"
    assert column_of(torch.device("cuda", 1)) == "triton"
    assert kernel("rms_norm", torch.device("cpu")) is load("rms_norm", "cpu")
    monkeypatch.setenv(ENVIRONMENT, "reference")
    assert kernel("rms_norm", torch.device("cpu")) is load("rms_norm", "reference")


def test_what_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(ValueError, match=r"unknown kernel 'softmax' in column 'cpu': choose one of"):
        kernel("softmax", torch.device("cpu"))
    with pytest.raises(ValueError, match=r"no kernels for device 'mps': use one of"):
        kernel("sample", torch.device("mps"))
    with pytest.raises(ValueError, match=r"unknown kernel column 'metal'"):
        load("sample", "metal")
    monkeypatch.setenv(ENVIRONMENT, "fast")
    with pytest.raises(ValueError, match="SPECDEC_KERNELS is 'fast', but it must be 'reference' or unset"):
        kernel("sample", torch.device("cpu"))


def rows() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(40, 500, generator=generator) * 3
    logits[7] = -torch.inf
    logits[8, :] = torch.nan
    logits[9, 3:] = -torch.inf
    logits[10, [4, 9]] = 50.0
    count = torch.arange(40)
    return logits, {
        "temperature": torch.tensor([1.0, 0.7, 0.0, 1.4])[count % 4],
        "top_k": torch.tensor([0, 5, -1, 40, 1000])[count % 5],
        "top_p": torch.tensor([1.0, 0.9, 0.5])[count % 3],
        "min_p": torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.02])[count % 7],
    }


def test_the_cpu_column_samples_alike() -> None:
    logits, given = rows()
    u = uniform(torch.arange(40), torch.arange(40), purpose=PURPOSE_TARGET)
    law = load("target_law", "reference")(logits, **given)
    ours = load("target_law", "cpu")(logits.clone(), **given)
    assert torch.equal(ours > 0, law > 0)
    assert torch.allclose(ours.double(), law, rtol=1e-5, atol=1e-7)
    expected = load("sample_logits", "reference")(logits, u, **given)
    assert torch.equal(load("sample_logits", "cpu")(logits.clone(), u, **given), expected)
    assert torch.equal(load("sample", "cpu")(ours, u), expected)
    assert expected[[7, 8]].tolist() == [-1, -1]
    assert expected[10] == 4


@pytest.mark.parametrize("with_tree", [False, True])
def test_the_cpu_column_verifies_alike(with_tree: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    num_drafts = [4, 0, 3, -1, 4, 1] * 20
    cu = torch.tensor([0, *(max(count + 1, 0) for count in num_drafts)]).cumsum(0).int()
    targets = torch.randint(-1, 3, (int(cu[-1]),), generator=generator)
    drafts = torch.randint(-1, 3, (len(num_drafts), 4), generator=generator)
    parents = torch.stack(
        [torch.randint(-1, i, (len(num_drafts),), generator=generator) if i else torch.full((len(num_drafts),), -1) for i in range(4)], 1
    )
    given = {"cu_num_logits": cu, "parents": parents if with_tree else None}
    ours, expected = (load("verify_coupled", column)(targets, drafts, **given) for column in ("cpu", "reference"))
    for name, mine, theirs in zip(expected._fields, ours, expected, strict=True):
        assert torch.equal(mine, theirs), name
    assert len(expected.num_sampled.unique()) >= 4


@pytest.mark.parametrize("slots", [[9, -1, 2, 0], [-1, -1, -1, -1], [5, 1, 7, 11]], ids=["some", "all", "none"])
def test_rows_of_padding_write_nothing_into_the_cache(slots: list[int]) -> None:
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(4, 2, 8, generator=generator) for _ in range(2))
    caches = {column: [torch.full((3, 4, 2, 8), 7.0) for _ in range(2)] for column in ("cpu", "reference")}
    for column, (k_cache, v_cache) in caches.items():
        load("store_kv", column)(k, v, k_cache, v_cache, torch.tensor(slots))
    for ours, expected, rows in zip(*caches.values(), (k, v), strict=True):
        assert torch.equal(ours, expected)
        flat = ours.flatten(0, 1)
        written = {slot: row for row, slot in enumerate(slots) if slot >= 0}
        assert all(torch.equal(flat[slot], rows[row]) for slot, row in written.items())
        assert all(bool((flat[slot] == 7.0).all()) for slot in range(12) if slot not in written)
