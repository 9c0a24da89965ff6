"""The examples run as a reader would run them, at a reduced size."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.bench.fake_server import PIECES, TOKENS_PER_ANSWER, fake_server
from tests.engine.tokenizers_for_tests import toy_tokenizer
from tests.proposers.tiny import write_checkpoint

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name: str, *argv: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", [name, *argv])
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def check_markov(out: str, *, floor: float, slack: float, error: float) -> None:
    """Every total variation is at the floor, and tokens per pass are where Equation 1 puts them."""
    found = [float(value) for value in re.findall(r"total variation .*?(\d\.\d{4})", out)]
    assert len(found) == 5
    assert found == [pytest.approx(floor, abs=slack)] * 5
    pairs = re.findall(r"tokens per pass (\d\.\d+), Equation 1 (\d\.\d+)", out)
    assert len(pairs) == 4
    for measured, expected in pairs:
        assert float(measured) == pytest.approx(float(expected), abs=error)


@pytest.mark.law
def test_speculative_sampling_of_a_markov_source(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The floor of two samples of 20,000 is about 0.18; its spread from run to run is 0.003, and 0.006 that of tokens per pass."""
    out = run_example("markov_lossless.py", "20000", monkeypatch=monkeypatch, capsys=capsys)
    check_markov(out, floor=0.18, slack=0.02, error=0.04)


@pytest.mark.law
@pytest.mark.slow
def test_speculative_sampling_of_a_markov_source_at_full_size(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    check_markov(run_example("markov_lossless.py", monkeypatch=monkeypatch, capsys=capsys), floor=0.0425, slack=0.0025, error=0.01)


def test_the_markov_check_fails_for_a_biased_law() -> None:
    out = "total variation, floor: 0.0425\n" + "total variation 0.0425, tokens per pass 1.858, Equation 1 1.858\n" * 3
    with pytest.raises(AssertionError):
        check_markov(out + "total variation 0.0600, tokens per pass 1.858, Equation 1 1.858", floor=0.0425, slack=0.0025, error=0.01)
    with pytest.raises(AssertionError):
        check_markov(out + "total variation 0.0425, tokens per pass 1.900, Equation 1 1.858", floor=0.0425, slack=0.0025, error=0.01)


def test_offline_completion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, seed=0, max_positions=256)
    toy_tokenizer().hf.save_pretrained(tmp_path)
    out = run_example("offline.py", str(tmp_path), monkeypatch=monkeypatch, capsys=capsys)
    assert out.count("  -> ") == 3
    found = re.search(r"(\d+) of (\d+) drafts were right", out)
    assert found is not None
    assert 0 <= int(found[1]) <= int(found[2])
    assert int(found[2]) > 0


def test_a_proposer_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, seed=0, max_positions=256)
    toy_tokenizer().hf.save_pretrained(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as python does for the script it runs
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=os.pathsep)
    out = run_example("custom_proposer.py", str(tmp_path), monkeypatch=monkeypatch, capsys=capsys)
    found = re.search(r"(\d+) of (\d+) drafts were right", out)
    assert found is not None
    assert 0 <= int(found[1]) <= int(found[2])
    assert int(found[2]) > 0


def test_streaming_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        out = run_example("stream_chat.py", server.url, "hello", monkeypatch=monkeypatch, capsys=capsys)
        assert server.bodies[-1]["messages"] == [{"role": "user", "content": "hello"}]
    assert out == "".join(PIECES) + f"\n[{TOKENS_PER_ANSWER} tokens]\n"


def test_examples_are_short() -> None:
    sizes = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in EXAMPLES.glob("*.py")}
    assert len(sizes) >= 3
    assert {name: size for name, size in sizes.items() if size >= 60} == {}
