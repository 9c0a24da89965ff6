"""Figures of a drafter are counted where its state changes: beside a step, that state must not be looked at."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from specdec.engine.llm import LLM
from specdec.proposers.suffix import SuffixProposer
from specdec.sampling_params import SamplingParams
from tests.e2e.tiny_model import write_model


def test_only_the_thread_that_drafts_counts_what_the_drafter_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come and go on the worker's thread; the engine's thread, which tells /metrics, once died of walking through them meanwhile."""
    counted: list[tuple[str, int]] = []
    num_bytes = vars(SuffixProposer)["num_bytes"].fget

    def noted(proposer: SuffixProposer) -> int:
        counted.append((threading.current_thread().name, num_bytes(proposer)))
        return counted[-1][1]

    monkeypatch.setattr(SuffixProposer, "num_bytes", property(noted))
    with LLM(str(write_model(tmp_path / "tiny")), spec_method="suffix", spec_tokens=4, dtype="float32", num_blocks=64) as llm:
        llm.generate(["one two three", "four"], SamplingParams(max_tokens=12, temperature=0.0), use_tqdm=False)
    assert max(size for _, size in counted) > 0, "texts of running requests are held"
    assert {name for name, _ in counted} == {"specdec-worker"}
