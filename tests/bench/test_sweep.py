"""benchmarks/sweep.py: what it measures, that it goes on where it ended, and where a curve stops paying."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import sweep
from benchmarks.arms import Arm
from benchmarks.break_even import OFF, Curve, crossing, curves
from benchmarks.plots import draw, fit_panel
from specdec.errors import ConfigError
from tests.bench.fake_server import FakeServer, fake_server

SMALL = [
    "--methods",
    "ngram",
    "--drafts",
    "1",
    "3",
    "--concurrency",
    "1",
    "2",
    "--workload",
    "chat",
    "--num-requests",
    "2",
    "--warmup",
    "1",
]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Arm, FakeServer]]:
    """Scripted servers in the place of ours, with the arms that asked for them."""
    seen: list[tuple[Arm, FakeServer]] = []

    @contextlib.contextmanager
    def spawned(arms: Sequence[Arm]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for arm in arms:
                server = stack.enter_context(fake_server())
                arm.url = server.url
                seen.append((arm, server))
            yield

    monkeypatch.setattr(sweep, "spawned", spawned)
    return seen


def points_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def stop_after(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the prompts run out after so many rounds of two loads with two requests each."""
    real = sweep.Cell.prompts

    def prompts(cell: sweep.Cell, repeat: int) -> list[str]:
        if cell.skip >= 4 * rounds:
            raise ConfigError("no prompts are left")
        return real(cell, repeat)

    monkeypatch.setattr(sweep.Cell, "prompts", prompts)


def test_each_number_of_drafts_meets_the_same_prompts_on_one_server(
    servers: list[tuple[Arm, FakeServer]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_after(2, monkeypatch)
    assert sweep.main([*SMALL, "--seconds", "60", "--out", str(tmp_path)]) == 0
    (off, plain), (ngram, drafting) = servers
    assert "--no-speculation" in off.serve_args
    assert json.loads(ngram.serve_args[-1]) == {"method": "ngram", "num_speculative_tokens": 3, "policy": "fixed"}
    measured: dict[Any, list[str]] = {}
    for body in plain.bodies + drafting.bodies:
        measured.setdefault(body.get("speculative", {}).get("num_speculative_tokens", OFF), []).append(body["messages"][0]["content"])
    assert set(measured) == {OFF, 1, 3}
    assert sorted(measured[OFF]) == sorted(measured[1]) == sorted(measured[3])
    points = points_of(tmp_path / "points.jsonl")
    assert len(points) == 2 * 2 * 3  # rounds, loads, sides
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"points": 12, "not_measured_yet": []}
    assert ElementTree.parse(tmp_path / "sweep.svg").getroot().tag.endswith("svg")


def test_a_sweep_goes_on_where_it_ended(
    servers: list[tuple[Arm, FakeServer]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*SMALL, "--out", str(tmp_path)]
    with pytest.MonkeyPatch.context() as patch:
        stop_after(1, patch)
        sweep.main([*argv, "--seconds", "60"])
    first = (tmp_path / "points.jsonl").read_text(encoding="utf-8")
    stop_after(2, monkeypatch)
    sweep.main([*argv, "--seconds", "60"])
    both = (tmp_path / "points.jsonl").read_text(encoding="utf-8")
    assert both.startswith(first)
    units = [(point["round"], point["concurrency"], point["num_drafts"]) for point in points_of(tmp_path / "points.jsonl")]
    assert len(units) == len(set(units)) == 12
    sweep.main([*argv, "--seconds", "0"])  # only prints
    assert (tmp_path / "points.jsonl").read_text(encoding="utf-8") == both
    with pytest.raises(ConfigError, match="other max_tokens"):
        sweep.main([*argv, "--max-tokens", "5"])


def test_nothing_measured_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is measured"):
        sweep.main([*SMALL, "--seconds", "0", "--out", str(tmp_path)])


def test_no_prompt_comes_twice_in_any_round() -> None:
    args = sweep.parse_args(["--concurrency", "1", "8", "--drafts", "1"])
    cells = [sweep.cell_of(sweep.Unit("ngram", "copy", size, number), args) for number in range(3) for size in (1, 8)]
    prompts = [prompt for cell in cells for prompt in cell.prompts(0)]
    assert len(prompts) == len(set(prompts)) == 3 * (4 + 16)


def test_an_own_config_stands_alone_unless_methods_are_named() -> None:
    assert list(sweep.parse_args(["--config", 'mine={"method": "suffix"}']).configs) == ["mine"]
    assert list(sweep.parse_args(["--config", "mine={}", "--methods", "ngram"]).configs) == ["ngram", "mine"]
    assert list(sweep.parse_args([]).configs) == list(sweep.METHODS)


def test_ratios_are_taken_within_rounds() -> None:
    """Round 1 was slow for all; a ratio of medians would give 150 / 100 = 1.5, the median of ratios is 2."""
    speeds = {0: (100.0, 200.0), 1: (40.0, 80.0), 2: (100.0, 150.0)}
    points = [
        {"workload": "chat", "method": "m", "round": number, "concurrency": 1, "num_drafts": drafts, "tok_per_s": speed}
        for number, pair in speeds.items()
        for drafts, speed in zip((OFF, 3), pair, strict=True)
    ]
    assert curves(points) == [Curve("chat", "m", 3, {1: 2.0})]


@pytest.mark.parametrize(
    ("ratios", "words"),
    [({1: 2.0, 4: 1.5}, "> 4"), ({1: 0.9, 4: 1.5}, "< 1"), ({1: 2.0, 4: 2.0, 16: 0.5}, "8"), ({8: 1.0, 32: 0.9}, "8")],
)
def test_a_curve_stops_paying_where_it_falls_through_1(ratios: dict[int, float], words: str) -> None:
    assert Curve("chat", "m", 3, ratios).stops_paying() == words


def test_the_crossing_lies_on_the_line_over_logarithms() -> None:
    assert crossing((4, 2.0), (16, 0.5)) == pytest.approx(8.0)
    assert crossing((4, 4.0), (32, 0.5)) == pytest.approx(16.0)  # 3 octaves of size and of ratio; ratio 1 after two


def test_pictures_are_svg_or_png_and_nothing_else(tmp_path: Path) -> None:
    panel = fit_panel([2.0, 1.0], [5.0, 3.0], [5.1, 2.9], title="t", xlabel="x", ylabel="y")
    draw(tmp_path / "a.png", [[panel]], title="title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="no ending of a picture"):
        draw(tmp_path / "a.doc", [[panel]], title="title")
