"""The soak of benchmarks/soak.py: twenty seconds here, three minutes where there is time (--soak), half an hour by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.soak import Course, main, verdict
from tests.e2e.tiny_model import write_model

SERVE = "--dtype float32 --device cpu --max-num-seqs 8 --num-blocks 400 --no-ui --spec-method ngram --spec-tokens 4"


def soaked(tmp_path: Path, capsys: pytest.CaptureFixture[str], *, minutes: float, min_ratio: float) -> dict[str, object]:
    out = tmp_path / "soak.jsonl"
    argv = ["--serve", f"{write_model(tmp_path / 'tiny')} {SERVE}", "--minutes", str(minutes), "--concurrency", "8"]
    code = main([*argv, "--max-tokens", "24", "--questions", "24", "--min-ratio", str(min_ratio), "--out", str(out)])
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
