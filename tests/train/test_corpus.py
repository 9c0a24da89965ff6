"""The files of a corpus say what was put in, who wrote it and of which layers the states are; what does not fit together is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdec.errors import ConfigError
from specdec.train.features import check_space, make_features
from specdec.train.manifest import check_written_by, model_fingerprint, write_manifest
from specdec.train.run import TrainingRun
from specdec.train.shards import (
    Corpus,
    Document,
    Origin,
    features_path,
    layers_of,
    read_origin,
    read_shard,
    save_atomically,
    write_shard,
)
from tests.train.conftest import TAPS, Taught

ORIGIN = Origin(model="aa", source="a file", seed=3, asked=("k1", "k2"))


def documents(count: int, *, high: int = 90) -> list[Document]:
    generator = torch.Generator().manual_seed(count)
    return [
        Document(
            ids=torch.randint(0, high, (5 + index % 7,), generator=generator),
            prompt_len=2 + index % 3,
            temperature=index % 2 / 2,
            seed=index,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("vocab_size", "high", "dtype"), [(97, 90, torch.uint16), (65536, 65536, torch.uint16), (70000, 70000, torch.int32)]
)
def test_a_shard_holds_what_was_put_in(tmp_path: Path, vocab_size: int, high: int, dtype: torch.dtype) -> None:
    shard, written = tmp_path / "shard-00000.safetensors", documents(9, high=high)
    write_shard(shard, written, vocab_size=vocab_size, origin=ORIGIN)
    assert load_file(shard)["ids"].dtype == dtype
    for before, after in zip(written, read_shard(shard, features=False), strict=True):
        assert torch.equal(before.ids, after.ids)
        assert (before.prompt_len, before.temperature, before.seed) == (after.prompt_len, after.temperature, after.seed)
    assert read_origin(shard) == ORIGIN
    write_shard(shard, written, vocab_size=vocab_size)
    assert read_origin(shard) is None


def test_one_document_in_fifty_is_held_out_for_good(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard-00000.safetensors", documents(120), vocab_size=97)
    first = Corpus(tmp_path, features=False)
    assert [len(first.documents(split)) for split in ("train", "eval")] == [118, 2]
    write_shard(tmp_path / "shard-00001.safetensors", documents(60), vocab_size=97)
    later = Corpus(tmp_path, features=False)
    assert [document.seed for document in later.documents("eval")] == [49, 99, 49]
    assert [document.seed for document in later.documents("train")][:118] == [document.seed for document in first.documents("train")]


def test_the_manifest_is_what_the_shards_hold(tmp_path: Path) -> None:
    parts = [documents(8), documents(5)]
    for number, part in enumerate(parts):
        origin = replace(ORIGIN, asked=tuple(f"{number}/{index}" for index in range(10)))
        write_shard(tmp_path / f"shard-0000{number}.safetensors", part, vocab_size=97, origin=origin)
    write_manifest(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["model"], manifest["documents"], manifest["asked"]) == (["aa"], 13, 20)
    answers = [sum(len(document.ids) - document.prompt_len for document in part) for part in parts]
    assert manifest["answer_tokens"] == sum(answers)
    for number, row in enumerate(manifest["shards"]):
        shard = tmp_path / f"shard-0000{number}.safetensors"
        assert row == {
            "name": shard.name,
            "sha256": hashlib.sha256(shard.read_bytes()).hexdigest(),
            "documents": len(parts[number]),
            "tokens": sum(len(document.ids) for document in parts[number]),
            "answer_tokens": answers[number],
            "greedy_documents": sum(document.temperature == 0 for document in parts[number]),
            "model": "aa",
            "source": "a file",
            "seed": 3,
            "asked": 10,
        }


def test_a_fingerprint_knows_weights_and_configuration(tmp_path: Path) -> None:
    weights = torch.zeros(1 << 20)
    (tmp_path / "config.json").write_text("{}")
    save_atomically({"w": weights}, tmp_path / "model.safetensors")
    first = model_fingerprint(tmp_path)
    assert first == model_fingerprint(tmp_path)
    save_atomically({"w": weights + 1e-3}, tmp_path / "model.safetensors")
    second = model_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    assert len({first, second, model_fingerprint(tmp_path)}) == 3


def test_texts_of_another_target_are_refused(taught: Taught, tmp_path: Path) -> None:
    shard = tmp_path / "shard-00000.safetensors"
    with pytest.raises(ConfigError, match="holds no shard"):
        check_written_by(tmp_path, taught.target)
    write_shard(shard, documents(3), vocab_size=97)
    check_written_by(tmp_path, taught.target)  # nobody says who wrote them
    write_shard(shard, documents(3), vocab_size=97, origin=replace(ORIGIN, model=model_fingerprint(taught.target)))
    check_written_by(tmp_path, taught.target)
    write_shard(shard, documents(3), vocab_size=97, origin=ORIGIN)
    with pytest.raises(ConfigError, match="written by another model: fingerprint aa"):
        check_written_by(tmp_path, taught.target)


def test_states_of_chosen_layers_go_into_the_head(taught: Taught, tmp_path: Path) -> None:
    """Features of other layers than the default are the target's there, and the exported head asks for the same."""
    written = list(read_shard(taught.data / "shard-00000.safetensors", features=False))
    shard = tmp_path / "shard-00000.safetensors"
    write_shard(shard, written, vocab_size=97)
    layers = (1, 4)
    assert layers != TAPS
    steps: list[int] = []
    assert make_features(tmp_path, taught.served, layers, advance=steps.append) == 1
    assert sum(steps) == sum(len(document.ids) for document in written)
    assert len(steps) > 1  # the bar moves within a shard
    assert layers_of(features_path(shard)) == layers
    document = Corpus(tmp_path, features=True).documents("train")[1]
    streams: list[torch.Tensor] = []
    hook = taught.model.model.layers[0].register_forward_hook(lambda _, args, out: streams.append(out))
    hook_last = taught.model.model.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    with torch.no_grad():
        taught.model(document.ids[None])
    hook.remove()
    hook_last.remove()
    assert document.aux is not None
    for place, stream in enumerate(streams):
        torch.testing.assert_close(document.aux[:, place].float(), stream[0] if stream.ndim == 3 else stream, atol=2e-2, rtol=1e-2)
    for method, key in (("eagle3", "eagle_aux_hidden_state_layer_ids"), ("dspark", "target_layer_ids")):
        run = TrainingRun(method, data=tmp_path, directory=tmp_path / method, target=taught.tables)
        config = json.dumps(run.head.config())  # type: ignore[operator]
        assert f'"{key}": {[1, 4] if method == "eagle3" else [0, 3]}' in config


def test_layers_and_features_that_do_not_fit_are_named(taught: Taught, tmp_path: Path) -> None:
    for layers in ((), (0, 2), (2, 1), (2, 2), (1, 5)):
        with pytest.raises(ConfigError, match="ascending numbers from 1 to 4"):
            make_features(taught.data, taught.served, layers)
    with pytest.raises(ConfigError, match=r"layers is \(1, 4\), but features-00000.safetensors holds states of layers"):
        make_features(taught.data, taught.served, (1, 4))
    for number, layers_text in enumerate(("1,2", "1,3")):
        shard = tmp_path / f"shard-0000{number}.safetensors"
        write_shard(shard, documents(2), vocab_size=97)
        states = torch.zeros(sum(len(document.ids) for document in documents(2)), 4, dtype=torch.bfloat16)
        save_atomically({"aux": states[:, None].clone(), "hidden": states}, features_path(shard), metadata={"layers": layers_text})
    with pytest.raises(ConfigError, match=r"of layers \(1, 3\), but those of shard-00000.safetensors are of layers \(1, 2\)"):
        Corpus(tmp_path, features=True)
    save_atomically({"aux": states[:, None].clone(), "hidden": states}, features_path(shard))
    with pytest.raises(ConfigError, match="does not say which layers"):
        Corpus(tmp_path, features=True)


def test_a_full_disk_is_told_before_the_work(tmp_path: Path) -> None:
    check_space(tmp_path, num_tokens=10, token_bytes=4608)
    with pytest.raises(ConfigError, match="the states of 1000000000000 tokens take"):
        check_space(tmp_path, num_tokens=10**12, token_bytes=4608)
