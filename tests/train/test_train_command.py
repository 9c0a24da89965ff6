"""specdec train, as typed: what it writes, what it says, and errors of two lines before anything slow."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specdec import cli
from specdec.config.token_map import read_token_map
from specdec.train.manifest import model_fingerprint
from specdec.train.shards import Corpus, Origin, features_path, layers_of, read_shard, write_shard
from tests.models.test_mtp_published import write_mimo
from tests.train.conftest import TAPS, Taught


def _copy(taught: Taught, out: Path, *, fingerprint: str) -> Path:
    """The texts of the tiny target, said to be written by the model of that fingerprint."""
    documents = list(read_shard(taught.data / "shard-00000.safetensors", features=False))
    out.mkdir()
    shard = out / "shard-00000.safetensors"
    write_shard(shard, documents, vocab_size=97, origin=Origin(model=fingerprint, source="test", seed=0))
    return shard


def test_features_fit_and_export_as_typed(
    taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specdec.tools.train_command._special_ids", lambda path: (0,))  # the tiny target has no tokenizer
    shard = _copy(taught, tmp_path / "data", fingerprint=model_fingerprint(taught.target))
    where = ["--model", str(taught.target), "--data", str(shard.parent)]
    assert cli._run(["train", "features", *where]) == 0
    tokens = len(torch.cat([document.ids for document in read_shard(shard, features=False)]))
    assert f"1 shards, {tokens} tokens" in capsys.readouterr().out
    assert layers_of(features_path(shard)) == TAPS
    known, made = (Corpus(path, features=True).documents("train") for path in (taught.data, shard.parent))
    for one, other in zip(known, made, strict=True):
        assert one.hidden is not None
        assert other.hidden is not None
        torch.testing.assert_close(one.hidden.float(), other.hidden.float(), atol=0.1, rtol=0.1)  # float32 there, bfloat16 here
    assert cli._run(["train", "features", *where]) == 0
    assert "0 shards, 0 tokens" in capsys.readouterr().out
    run, head = str(tmp_path / "run"), tmp_path / "head"
    assert cli._run(["train", "fit", "dspark", *where, "--out", run, "--steps", "2", "--batch-size", "4"]) == 0
    assert cli._run(["train", "export", "dspark", *where, "--run", run, "--out", str(head)]) == 0
    assert json.loads((head / "provenance.json").read_text())["steps"] == 2
    assert (head / "model.safetensors").exists()


def test_a_target_that_transformers_does_not_know_is_trained_on(taught: Taught, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MiMo's own type has its layers and its module, of which none is code of the checkpoint."""
    target = tmp_path / "MiMo-7B-RL"
    write_mimo(target)
    (tmp_path / "data").mkdir()
    shard = tmp_path / "data" / "shard-00000.safetensors"
    documents = list(read_shard(taught.data / "shard-00000.safetensors", features=False))
    write_shard(shard, documents, vocab_size=97, origin=Origin(model=model_fingerprint(target), source="test", seed=0))
    where = ["--model", str(target), "--data", str(shard.parent)]
    assert cli._run(["train", "features", *where, "--layers", "1,2,3"]) == 0
    assert cli._run(["train", "fit", "eagle3", *where, "--out", str(tmp_path / "run"), "--steps", "1", "--batch-size", "4"]) == 0
    assert cli._run(["train", "export", "eagle3", *where, "--run", str(tmp_path / "run"), "--out", str(tmp_path / "head")]) == 0
    assert json.loads((tmp_path / "head" / "config.json").read_text())["rope_theta"] == 640000
    assert cli._run(["train", "token-map", *where, "--size", "12", "--out", str(tmp_path / "hot.pt")]) == 0
    assert f"12 ids in {tmp_path / 'hot.pt'}" in capsys.readouterr().out.replace("\n", "")
    assert len(read_token_map(str(tmp_path / "hot.pt"), 97)) == 12


def test_curves_are_drawn_for_tensorboard(taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package is optional; a stand-in takes what is drawn."""
    drawn: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, directory: str) -> None:
            assert directory == str(tmp_path / "curves")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            drawn.append((name, value, step))

        def flush(self) -> None: ...

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    monkeypatch.setattr("specdec.tools.train_command._special_ids", lambda path: (0,))
    where = ["--model", str(taught.target), "--data", str(taught.data)]
    more = ["--out", str(tmp_path / "run"), "--steps", "3", "--batch-size", "4", "--tensorboard", str(tmp_path / "curves")]
    assert cli._run(["train", "fit", "mtp", *where, *more]) == 0
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [(value, step) for name, value, step in drawn if name == "loss"] == [(line["loss"], line["step"]) for line in logged]
    last = {name: value for name, value, step in drawn if step == 3}
    assert [last[f"accepted/{place}"] for place in range(3)] == logged[-1]["acceptance"]
    assert last["accepted/length"] == pytest.approx(1 + sum(logged[-1]["acceptance"]))


def test_curves_without_the_package_are_refused(
    taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    where = ["--data", str(taught.data), "--model", str(taught.target), "--out", str(tmp_path / "run"), "--tensorboard", "x"]
    assert cli._run(["train", "fit", "mtp", *where]) == 2
    assert "--tensorboard needs the package tensorboard" in capsys.readouterr().err


@pytest.mark.parametrize("step", ["features", "fit", "export"])
def test_texts_of_another_model_are_refused_at_every_step(
    taught: Taught, tmp_path: Path, capsys: pytest.CaptureFixture[str], step: str
) -> None:
    shard = _copy(taught, tmp_path / "data", fingerprint="feed")
    more = {"features": [], "fit": ["dspark", "--out", str(tmp_path / "run")], "export": ["dspark", "--run", "r", "--out", "o"]}[step]
    assert cli._run(["train", step, *more, "--model", str(taught.target), "--data", str(shard.parent)]) == 2
    told = capsys.readouterr().err
    assert "was written by another model: fingerprint feed" in told
    assert "hint:" in told


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["data", "--out", "x", "--tokens", "0"], "tokens is 0, but it must be at least 1"),
        (["data", "--out", "x", "--answer-tokens", "2"], "answer-tokens is 2, but it must be at least 8"),
        (["data", "--out", "x", "--prompts", "no/such/file"], "--prompts 'no/such/file' cannot be read"),
        (["features", "--data", "x", "--layers", "1,b"], "layers is '1,b', but it must be numbers"),
    ],
)
def test_bad_options_are_told_before_a_model_is_loaded(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.models.source.locate_target", None)
    assert cli._run(["train", *argv]) == 2
    assert message in capsys.readouterr().err.replace("\n", "")
    assert not Path("x").exists()
