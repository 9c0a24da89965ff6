"""benchmarks/compare.py: the engines that it starts, one at a time, and where its table goes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks import compare, compare_table, engines
from benchmarks.arms import Arm
from specdec.errors import ConfigError
from tests.bench.fake_server import TOKENS_PER_ANSWER, fake_server

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compare, "locate_target", lambda _: type("Files", (), {"model_path": str(tmp_path / "model")}))
    monkeypatch.setattr(compare, "embedded_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(compare, "as_bf16", lambda *_: tmp_path / "bf16.gguf")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Scripted servers in the place of engines, and which were started; those named broken do not come up."""
    alive: list[str] = []
    labels: list[str] = []

    @contextlib.contextmanager
    def spawned(arms: Sequence[Arm]) -> Iterator[None]:
        (arm,) = arms
        assert not alive, "one engine at a time"
        labels.append(arm.label)
        if "broken" in arm.label:
            raise ConfigError(f"arm {arm.label} ended with status 1:\ndetails", hint="")
        with fake_server() as server:
            alive.append(arm.label)
            arm.url = server.url
            yield
            alive.remove(arm.label)

    monkeypatch.setattr(compare, "spawned", spawned)
    return labels


def test_every_engine_gets_the_same_weights_and_none_a_cache_of_prompts(tmp_path: Path) -> None:
    args = compare.parse_args(["--vllm", "/env", "--llama-cpp", "/llama", "--concurrency", "1", "4"])
    found = {engine.arm.label: engine for engine in compare.chosen(args)}
    assert list(found) == [
        "specdec, plain",
        "specdec",
        "llama.cpp bf16",
        "llama.cpp bf16, n-gram",
        "llama.cpp Q4_1",
        "llama.cpp Q4_1, n-gram",
        "vLLM",
        "vLLM, n-gram",
        "transformers",
    ]
    for label in ("vLLM", "vLLM, n-gram", "transformers"):
        assert str(tmp_path / "model") in found[label].arm.program
    assert str(tmp_path / "bf16.gguf") in found["llama.cpp bf16"].arm.program
    assert str(tmp_path / "model.gguf") in found["llama.cpp Q4_1"].arm.program
    program = found["llama.cpp Q4_1, n-gram"].arm.program
    assert program[program.index("-np") + 1] == "4"
    assert program[program.index("-c") + 1] == str(4 * engines.MAX_LEN)
    assert "--no-repack" in program
    assert "--no-repack" not in found["llama.cpp bf16"].arm.program
    assert json.loads(found["vLLM, n-gram"].arm.program[-1])["method"] == "ngram"
    caches_off = {"specdec": "--no-enable-prefix-caching", "vLLM": "--no-enable-prefix-caching", "llama.cpp bf16": "--no-cache-prompt"}
    for label, flag in caches_off.items():
        assert flag in (*found[label].arm.program, *(found[label].arm.serve_args or ()))
    assert all(str(tmp_path) not in engine.arm.describe() for engine in found.values())  # a README has no machine's paths


def test_optional_engines_are_optional() -> None:
    assert [engine.drafts for engine in compare.chosen(compare.parse_args(["--no-transformers"]))] == ["", "default"]


def test_engines_run_one_at_a_time_and_the_table_goes_between_the_marks(
    started: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    marks = compare.MARKS
    (tmp_path / "README.md").write_text(f"before\n{marks.begin}\nold\n{marks.end}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    results = tmp_path / "results" / "compare.jsonl"
    argv = ["--count", "2", "--concurrency", "1", "2", "--workload", "copy", "--results", str(results)]
    assert compare.main([*argv, "--only", "specdec", "transformers", "--readme"]) == 0
    assert started == ["specdec, plain", "specdec", "transformers"]
    line = json.loads(results.read_text(encoding="utf-8"))
    assert [cell["num_tokens"]["transformers"] for cell in line["cells"]] == [[2 * TOKENS_PER_ANSWER]] * 2
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"before\n{marks.begin}\n| engine | weights | drafts | copy, 1 client, tok/s | copy, 2 clients, tok/s |")
    assert text.endswith(f"{marks.end}\nafter\n")
    assert "old" not in text


def test_an_engine_that_does_not_start_is_a_row_and_the_others_go_on(
    started: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engines, "transformers", lambda _: [engines.Engine(Arm("broken", serve_args=()), "bf16")])
    results = tmp_path / "compare.jsonl"
    argv = ["--count", "1", "--concurrency", "1", "--workload", "chat", "--results", str(results), "--only", "broken", "specdec"]
    assert compare.main(argv) == 0
    line = json.loads(results.read_text(encoding="utf-8"))
    assert line["engines"]["broken"]["failure"] == "details"
    assert "| broken | bf16 | none | did not run |" in compare_table.markdown(line)
    assert set(line["cells"][0]["figures"]) == {"specdec, plain", "specdec"}
    with pytest.raises(ConfigError, match="broken"):
        compare.measure([engines.Engine(Arm("broken", serve_args=()), "bf16")], [], compare.Plan())


def test_the_table_keeps_losses() -> None:
    cell = {
        "load": {"workload": "chat", "concurrency": 8, "rate": None, "num_requests": 16},
        "figures": {"specdec, plain": {"tok_per_s": [300.4, 1, 1]}, "other": {"tok_per_s": [450.0, 1, 1]}},
        "ratio": {"other": [1.498]},
    }
    engine = {"command": "a --b", "weights": "bf16", "drafts": "", "failure": None}
    line = {
        "cells": [cell], "engines": {"specdec, plain": engine, "other": {**engine, "drafts": "n-gram lookup"}},
        "max_tokens": 128, "gpu": None,
        "cpu": "Some CPU", "cores": 2, "torch": "2.13.0", "transformers": "5.24.0", "commit": "abc1234", "time": "2026-12-01T00:00:00Z",
    }  # fmt: skip
    text = compare_table.markdown(line)
    assert "| specdec, plain | bf16 | none | 300 |" in text
    assert "| other | bf16 | n-gram lookup | 450 (1.50) |" in text
    assert "Some CPU, 2 cores; 16 requests a load" in text
    assert "- other: `a --b`" in text


def test_the_readme_of_this_repository_has_the_block() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index(compare.MARKS.begin) < text.index(compare.MARKS.end)
