"""benchmarks/compare.py: the engines that it starts, and where its table goes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from benchmarks import bench_server, compare
from benchmarks.arms import parse_arm


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compare, "locate_target", lambda _: type("Files", (), {"model_path": str(tmp_path / "model")}))
    monkeypatch.setattr(compare, "embedded_gguf", lambda: tmp_path / "model.gguf")


def test_every_engine_gets_the_same_weights_and_none_a_prefix_cache(tmp_path: Path) -> None:
    args = compare.parse_args(["--vllm", "/env", "--llama-server", "/bin/llama-server", "--concurrency", "1", "4"])
    arms = [parse_arm(text, "") for text in compare.arms(args)]
    assert [arm.label for arm in arms] == ["plain", "default", "transformers", "vllm", "vllm-ngram", "llama.cpp"]
    for arm in arms[2:5]:
        assert str(tmp_path / "model") in arm.program
    assert str(tmp_path / "model.gguf") in arms[5].program
    assert arms[5].program[arms[5].program.index("-np") + 1] == "4"
    assert json.loads(arms[4].program[-1])["method"] == "ngram"
    assert all(str(tmp_path) not in arm.describe() for arm in arms)  # a README has no machine's paths


def test_optional_engines_are_optional() -> None:
    assert len(compare.arms(compare.parse_args(["--no-transformers"]))) == 2


def test_the_options_are_those_of_the_server_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(bench_server, "main", given.append)
    assert compare.main(["--no-transformers", "--count", "2", "--results", str(tmp_path / "compare.jsonl")]) == 0
    args = bench_server.parse_args(given[0])
    assert args.one_at_a_time
    assert args.num_requests == 2
    assert shlex.split(args.arm[0].partition("=")[2]) == ["--no-speculation", "--no-enable-prefix-caching"]
