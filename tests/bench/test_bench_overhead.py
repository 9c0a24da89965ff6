"""bench_overhead.py on a tiny model: both sides answer the same tokens, and the figures are there. How fast is not looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bench_overhead import main
from tests.e2e.tiny_model import write_model


@pytest.mark.slow
def test_it_measures_both_sides_and_scrapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "overhead.jsonl"
    argv = ["--model", str(write_model(tmp_path / "tiny")), "--concurrency", "1", "3", "--repeats", "1", "--max-tokens", "24"]
    limits = ["--max-model-len", "96", "--max-num-seqs", "4", "--spec-method", "ngram", "--spec-tokens", "3"]
    assert main([*argv, *limits, "--out", str(out)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text(encoding="utf-8")) == record
    assert [cell["concurrency"] for cell in record["cells"]] == [1, 3]
    for cell in record["cells"]:
        assert min(cell["offline_tok_per_s"], cell["http_tok_per_s"]) > 0
        assert cell["ratio"] == pytest.approx(cell["http_tok_per_s"] / cell["offline_tok_per_s"], rel=0.01)
    assert record["metrics_scrape_under_load"]["num"] >= 1
