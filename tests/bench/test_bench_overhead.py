"""bench_overhead.py on a tiny model: both sides answer the same tokens, and the figures are there. How fast is not looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bench_overhead import cell_figures, faults_of, main, scrape_figures
from tests.e2e.tiny_model import write_model


@pytest.mark.slow
def test_it_measures_both_sides_and_scrapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "overhead.jsonl"
    argv = ["--model", str(write_model(tmp_path / "tiny")), "--concurrency", "1", "3", "--repeats", "1", "--max-tokens", "24"]
    limits = ["--max-model-len", "96", "--max-num-seqs", "4", "--spec-method", "ngram", "--spec-tokens", "3"]
    assert main([*argv, *limits, "--min-ratio", "0", "--max-scrape-ms", "60000", "--out", str(out)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text(encoding="utf-8")) == record
    assert [cell["concurrency"] for cell in record["cells"]] == [1, 3]
    for cell in record["cells"]:
        assert min(cell["offline_tok_per_s"], cell["http_tok_per_s"]) > 0
        assert cell["ratio"] == pytest.approx(cell["http_tok_per_s"] / cell["offline_tok_per_s"], rel=0.01), "one turn: its own ratio"
    assert record["metrics_scrape_under_load"]["num"] >= 1


def test_the_ratio_is_taken_within_each_turn() -> None:
    """The machine is half as fast in the second turn: sides that were pooled would be compared across it."""
    cell = cell_figures(4, [(100.0, 96.0), (50.0, 48.0), (100.0, 80.0)])
    assert cell == {
        "concurrency": 4, "offline_tok_per_s": 100.0, "http_tok_per_s": 80.0, "ratio": 0.96, "ratio_from": 0.8, "ratio_to": 0.96,
    }  # fmt: skip


def test_what_is_over_the_limits_is_a_fault() -> None:
    def faults(ratio: float, waits_s: list[float]) -> list[str]:
        found = {"cells": [cell_figures(1, [(100.0, 100 * ratio)])], "metrics_scrape_under_load": scrape_figures(waits_s)}
        return faults_of(found, min_ratio=0.95, max_scrape_ms=20.0)

    assert faults(0.95, [0.001] * 99 + [0.5]) == [], "one late scrape of a hundred is not p99"
    assert "0.949 of LLM.generate" in faults(0.949, [0.001])[0]
    assert "p99 of /metrics was 20.0 ms" in faults(1.0, [0.02])[0]
