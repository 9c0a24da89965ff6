"""benchmarks/step_cost.py: the fit against times made from known coefficients, and one run over a tiny model. How fast is not looked at."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.step_cost import BLOCK, cases, main, metadata
from benchmarks.step_fit import Case, fit
from tests.e2e.tiny_model import write_model

KNOWN = (12.0, 0.05, 0.002, 0.3)  # ms: base, a row, a token of context, a request


def known_ms(case: Case) -> float:
    base, row, context, request = KNOWN
    return base + row * case.requests * case.rows + context * case.requests * case.context + request * case.requests


def test_the_fit_finds_the_coefficients_that_made_the_times() -> None:
    shapes = cases(8192)
    found = fit(shapes, [known_ms(case) for case in shapes])
    assert (found.base_ms, found.row_ms, found.context_ms, found.request_ms) == pytest.approx(KNOWN, rel=1e-6)
    assert found.r2 == pytest.approx(1.0)
    assert found.at(Case(3, 5, 77)) == pytest.approx(known_ms(Case(3, 5, 77)))


def test_a_cliff_is_what_lies_furthest_above_the_fit() -> None:
    shapes = cases(8192)
    noise = random.Random(3)
    times = [known_ms(case) * noise.uniform(0.98, 1.02) for case in shapes]
    cliff = shapes.index(Case(1, 32, 256))
    times[cliff] *= 1.5
    found = fit(shapes, times)
    assert found.worst == cliff
    assert found.residuals[cliff] > 0.3
    assert found.row_ms == pytest.approx(KNOWN[1], rel=0.3)


def test_too_few_shapes_are_no_fit() -> None:
    with pytest.raises(ValueError, match="4 or more"):
        fit(cases(8192)[:3], [1.0, 2.0, 3.0])


def test_shapes_grow_alone_and_fit_the_model() -> None:
    long, short = cases(8192), cases(128)
    assert max(case.context for case in long) == 4000
    assert len(long) == len(set(long))
    assert max(case.context + case.rows for case in short) <= 128


def test_requests_of_a_step_have_places_of_their_own() -> None:
    positions, meta = metadata(Case(3, 4, 20))
    assert positions.tolist() == [20, 21, 22, 23] * 3
    assert meta.seq_lens_cpu == (24, 24, 24)
    slots = meta.slot_mapping.tolist()
    assert len(set(slots)) == 12
    blocks = [{slot // BLOCK for slot in slots[4 * index : 4 * index + 4]} for index in range(3)]
    assert not blocks[0] & blocks[1]
    assert not blocks[1] & blocks[2]


@pytest.mark.slow
def test_it_measures_a_tiny_model_fits_draws_and_steps_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_model(tmp_path / "tiny"))
    argv = ["--model", model, "--dtype", "float32", "--seconds", "0", "--host-requests", "1", "3", "--host-steps", "4"]
    assert main([*argv, "--plot", str(tmp_path / "step.svg")]) == 0
    out = capsys.readouterr().out
    line = json.loads(out.splitlines()[-1])
    assert line["rounds"] == 3
    assert len(line["step_ms"]) == len(line["cases"])
    assert min(line["step_ms"]) > 0
    assert [(host["drafts"], host["requests"]) for host in line["host"]] == [("off", 1), ("off", 3), ("suffix", 1), ("suffix", 3)]
    for host in line["host"]:
        assert 0 < host["host"] < host["step"]
        assert host["forward"] > 0
    assert "us a row" in out
    assert "<svg" in (tmp_path / "step.svg").read_text(encoding="utf-8")
