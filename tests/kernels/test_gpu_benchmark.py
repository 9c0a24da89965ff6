"""benchmarks/gpu.py in its tiny form: the calls it times are the kernels' own, and a wrong kernel is called wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_kernels import calls, results
from specdec.kernels.dispatch import kernel


def test_the_tiny_form_checks_everything_and_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--cpu", "--out", str(tmp_path / "gpu.json")]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["skipped"] == []
    checked = [row for row in found["kernels"] if "differs" in row]
    assert {row["kernel"] for row in checked} >= {"sample_logits", "rejection_sample", "block_verify", "paged_attention", "store_kv"}
    assert {(row["batch"], row["drafts"]) for row in found["steps"]} == {(1, 0), (1, 2), (2, 0), (2, 2)}
    assert all(row["tokens"] > 1 for row in found["steps"] if row["drafts"])
    assert found["transformers"][0]["differs"] < 1e-4
    assert "all agree" in capsys.readouterr().out


def test_a_wrong_kernel_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(name: str, device: torch.device) -> Any:
        right = kernel(name, device)
        return (lambda *a, **k: right(*a, **k) * 1.1) if name == "rms_norm" else right

    monkeypatch.setattr(gpu, "kernel", wrong)
    assert gpu.main(["--cpu", "--out", str(tmp_path / "gpu.json")]) == 1


def test_what_there_is_no_time_for_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--cpu", "--seconds", "0", "--out", str(tmp_path / "gpu.json")]) == 0
    assert "left out for lack of time: check of sample_logits" in capsys.readouterr().out


def test_calls_leave_their_arguments_alone() -> None:
    for call in calls(gpu.TINY, torch.device("cpu"), torch.float32):
        before = [x.clone() if isinstance(x, torch.Tensor) else x for x in call.arguments]
        results(call, kernel(call.name, torch.device("cpu")))
        for now, then in zip(call.arguments, before, strict=True):
            assert not isinstance(now, torch.Tensor) or torch.equal(now, then)
