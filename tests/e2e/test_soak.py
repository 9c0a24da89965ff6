"""The soak of benchmarks/soak.py: twenty seconds here, three minutes where there is time (--soak), half an hour by hand."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from benchmarks.mixed import ProcessView, machine_busy_s
from benchmarks.soak import Course, Look, main, verdict
from tests.e2e.tiny_model import write_model

SERVE = "--dtype float32 --device cpu --max-num-seqs 8 --num-blocks 400 --no-ui --spec-method ngram --spec-tokens 4"


def soaked(tmp_path: Path, capsys: pytest.CaptureFixture[str], *, minutes: float, min_ratio: float) -> dict[str, object]:
    out = tmp_path / "soak.jsonl"
    argv = ["--serve", f"{write_model(tmp_path / 'tiny')} {SERVE}", "--minutes", str(minutes), "--concurrency", "8"]
    shared = ["--max-others", "1000"]  # the suite may share its machine
    code = main([*argv, *shared, "--max-tokens", "24", "--questions", "24", "--min-ratio", str(min_ratio), "--out", str(out)])
    printed: dict[str, object] = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text(encoding="utf-8")) == printed
    assert code == (1 if printed["faults"] else 0)
    return printed


@pytest.mark.slow
@pytest.mark.serial
def test_twenty_seconds_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So short a run on a machine with other work says little of speed: half of the first throughput is enough."""
    found = soaked(tmp_path, capsys, minutes=1 / 3, min_ratio=0.5)
    assert found["faults"] == []
    assert isinstance(found["num_requests"], int)
    assert found["num_requests"] > 50
    windows = found["windows"]
    assert isinstance(windows, list)
    assert len(windows) == 3
    assert all(window["cpu_ms_per_token"] > 0 and window["others_cores"] is not None for window in windows)


@pytest.mark.soak
@pytest.mark.serial
@pytest.mark.timeout(600)
def test_three_minutes_are_as_fast_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert soaked(tmp_path, capsys, minutes=3, min_ratio=0.97)["faults"] == []


def course(*, last_rate: int = 100, last_bytes: int = 1000) -> Course:
    return Course(
        tokens=[(float(at), last_rate if at >= 90 else 100) for at in range(120)],
        memory=[(float(at), last_bytes if at >= 90 else 1000) for at in range(120)],
    )


def test_the_verdict_compares_the_windows() -> None:
    def faults(seen: Course) -> list[str]:
        given: list[str] = verdict(seen, total_s=120, warmup_s=15, window_s=30, min_ratio=0.97)["faults"]
        return given

    assert faults(course()) == []
    assert faults(course(last_rate=97, last_bytes=1029)) == []
    assert "is 0.960 of the first" in faults(course(last_rate=96))[0]
    assert "memory grew by 4.0%" in faults(course(last_bytes=1040))[0]
    assert faults(Course()), "a server that answered nothing is no good server"
    failed = course()
    failed.failures.append("question 3: other text")
    assert faults(failed) == ["question 3: other text"]


def test_windows_tell_a_slow_server_from_a_busy_machine() -> None:
    """The last window has half the tokens: once for as much processor time each with others at work, once for twice as much alone."""
    seen = {}
    for name, (cpu_s, others_s) in {"busy": (0.5, 1.5), "slow": (1.0, 0.0)}.items():
        given = course(last_rate=50)
        server_s = elsewhere_s = 0.0
        for at in range(120):
            given.looks.append(Look(float(at), server_s, elsewhere_s))
            server_s += cpu_s if at >= 90 else 1.0
            elsewhere_s += others_s if at >= 90 else 0.0
        found = verdict(given, total_s=120, warmup_s=30, window_s=30, min_ratio=0.97)
        assert "is 0.500 of the first" in found["faults"][0], "neither is excused"
        seen[name] = [(window["tok_per_s"], window["cpu_ms_per_token"], window["others_cores"]) for window in found["windows"]]
    assert seen["busy"] == [(100.0, 10.0, 0.0), (100.0, 10.0, 0.0), (50.0, 10.0, 1.5)]
    assert seen["slow"] == [(100.0, 10.0, 0.0), (100.0, 10.0, 0.0), (50.0, 20.0, 0.0)]


def test_a_comparison_that_other_work_made_void_is_no_pass() -> None:
    """The first window is starved or the server stopped: the ratio is fine, and says nothing."""

    def faults(given: Course) -> list[str]:
        found: list[str] = verdict(given, total_s=120, warmup_s=30, window_s=30, min_ratio=0.97)["faults"]
        return found

    def looked(cores: float) -> list[Look]:
        return [Look(float(at), float(at), cores * min(at, 60)) for at in range(120)]

    starved = course()
    starved.tokens = [(at_s, 10 if at_s < 60 else 100) for at_s, _ in starved.tokens]
    starved.looks = looked(1.5)
    assert faults(starved) == ["other processes kept 1.50 cores busy, the limit is 0.25: run it again on a quiet machine"]
    starved.looks = looked(0.2)
    assert faults(starved) == []
    stopped = course()
    stopped.tokens = [(at_s, count) for at_s, count in stopped.tokens if not 60 <= at_s < 90]
    assert faults(stopped) == ["no answer ended in the windows that began at 60 s"]


def test_processor_time_is_that_of_the_process() -> None:
    before_s, busy_s, own_s = ProcessView(os.getpid()).cpu_s(), machine_busy_s(), time.process_time()
    while time.process_time() < own_s + 0.3:
        pass
    assert ProcessView(os.getpid()).cpu_s() - before_s == pytest.approx(time.process_time() - own_s, abs=0.1)
    assert machine_busy_s() - busy_s >= 0.2
