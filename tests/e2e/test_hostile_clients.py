"""The storm of benchmarks/hostile.py in small: rude clients neither harm a served tiny model nor the polite clients beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.hostile import KINDS, Report, main
from tests.e2e.tiny_model import write_model

pytestmark = [pytest.mark.slow, pytest.mark.serial]


def test_rude_clients_do_no_harm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """150 requests by 24 clients; /health gets more time than in the full run, as a machine with other work is slow by itself."""
    serve = f"{write_model(tmp_path / 'tiny')} --dtype float32 --device cpu --max-num-seqs 16 --num-blocks 400 --no-ui"
    serve += " --spec-method ngram --spec-tokens 4"
    code = main(["--serve", serve, "--clients", "24", "--requests", "150", "--warmup", "100", "--max-tokens", "24", "--health-limit", "1"])
    report = json.loads(capsys.readouterr().out)
    assert report["faults"] == []
    assert code == 0
    kinds = {name.partition(":")[0] for name in report["outcomes"]}
    assert kinds == set(KINDS), "every kind of client took part"
    assert sum(report["outcomes"].values()) == 150


def test_the_verdict_sees_each_fault() -> None:
    quiet = dict.fromkeys(("kv_cache_usage", "running", "waiting", "unfinished", "files", "threads", "resident_bytes"), 10.0)
    clean = Report(before=quiet, after=quiet | {"resident_bytes": 10.2}, health_ms={"p99": 90.0})
    clean.outcomes["whole: as alone"] = 3
    clean.judge(max_health_s=0.1)
    assert clean.faults == []
    for name in quiet:
        leaking = Report(before=quiet, after=quiet | {name: 11.0}, health_ms={"p99": 1.0})
        leaking.judge(max_health_s=0.1)
        assert len(leaking.faults) == 1, name
    slow = Report(before=quiet, after=quiet, health_ms={"p99": 101.0}, wrong=["question 1"])
    slow.outcomes["oversized: 200 unexpected"] = 1
    slow.judge(max_health_s=0.1)
    assert len(slow.faults) == 3
