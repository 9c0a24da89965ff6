"""Checkpoints that are incomplete, damaged, or of something else stop the start and name the tensor or file at fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.errors import ConfigError
from specdec.models.loader import Checkpoint
from specdec.models.registry import TargetModel, load_model
from specdec.models.source import locate_target
from tests.models.paged import PagedRun
from tests.models.tiny import oracle_logits, random_prompt, read_config, saved, tiny_config

Tensors = dict[str, torch.Tensor]
NORM = "model.layers.1.input_layernorm.weight"


def load(path: Path) -> TargetModel:
    return load_model(str(path), read_config(path), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)


def rewrite(path: Path, change: Callable[[Tensors], object]) -> None:
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def shard(path: Path) -> dict[str, str]:
    """Split the weights into two files with an index; return its weight map."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, path / file, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def swap_halves(tensors: Tensors) -> None:
    tensors[NORM] = tensors[NORM][:16]


REFUSED: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "missing": ("llama_untied", lambda t: t.pop(NORM), rf"tensor `{NORM}` is missing"),
    "missing head": ("llama_untied", lambda t: t.pop("lm_head.weight"), r"tensor `lm_head\.weight` is missing"),
    "missing one bias of three": ("qwen2_bias", lambda t: t.pop("model.layers.0.self_attn.k_proj.bias"), r"k_proj\.bias` is missing"),
    "missing head norm": ("qwen3_norms", lambda t: t.pop("model.layers.2.self_attn.k_norm.weight"), r"k_norm\.weight` is missing"),
    "unexpected": ("llama_untied", lambda t: t.update(extra=torch.ones(2)), r"unexpected tensor `extra`"),
    "a layer too many": (
        "llama_tied",
        lambda t: t.update({name.replace(".2.", ".3."): tensor.clone() for name, tensor in t.items() if ".2." in name}),
        r"unexpected tensor `model\.layers\.3\.input_layernorm\.weight` and 8 more",
    ),
    "wrong shape": ("llama_untied", swap_halves, rf"tensor `{NORM}` .*has shape \[16\], but the config asks for \[32\]"),
}
FALLBACK_REFUSED: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "missing": (
        "phi_partial_rotary",
        lambda t: t.pop("model.layers.1.mlp.fc1.bias"),
        r"missing tensor `model\.layers\.1\.mlp\.fc1\.bias` in",
    ),
    "missing two": (
        "gpt2_learned_positions",
        lambda t: [t.pop(name) for name in ("transformer.h.0.ln_1.bias", "transformer.h.2.ln_2.bias")],
        r"missing tensor `transformer\.h\.0\.ln_1\.bias` and 1 more",
    ),
    "unexpected": ("gemma_scaled_embedding", lambda t: t.update(extra=torch.ones(2)), r"unexpected tensor `extra` in"),
    "wrong shape": ("gemma_scaled_embedding", swap_halves, rf"tensor `{NORM}` .*has shape \[16\], but the config asks for \[32\]"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_lean_models_name_the_tensor(tmp_path: Path, fault: str) -> None:
    name, change, message = REFUSED[fault]
    saved(name, tmp_path)
    load(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path)
    assert caught.value.hint


@pytest.mark.parametrize("fault", FALLBACK_REFUSED)
def test_transformers_models_name_the_tensor(tmp_path: Path, fault: str) -> None:
    name, change, message = FALLBACK_REFUSED[fault]
    saved(name, tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("qwen2_bias", "self_attn.%s_proj.bias"), ("llama_biases", "self_attn.%s_proj.bias"), ("qwen3_norms", "self_attn.%s_norm.weight")],
)
def test_parts_that_the_family_always_has_may_not_all_be_absent(tmp_path: Path, name: str, prefix: str) -> None:
    saved(name, tmp_path)
    rewrite(tmp_path, lambda t: [t.pop(f"model.layers.0.{prefix % x}", None) for x in "qkv"])
    with pytest.raises(ConfigError, match=rf"model\.layers\.0\.{prefix.replace('.', '[.]') % 'q'}` is missing"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["llama_untied", "gpt2_learned_positions"])
def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path, name: str) -> None:
    oracle = saved(name, tmp_path)
    assert len(set(shard(tmp_path).values())) == 2
    ids = random_prompt(9, seed=1)
    logits = PagedRun(load(tmp_path)).feed({0: ids})[0]
    torch.testing.assert_close(logits, oracle_logits(oracle, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama_untied", "gpt2_learned_positions"])
def test_a_missing_shard_is_named(tmp_path: Path, name: str) -> None:
    saved(name, tmp_path)
    shard(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    for entry in (lambda: locate_target(str(tmp_path)), lambda: load(tmp_path)):
        with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors"):
            entry()


def test_an_index_that_names_a_tensor_its_shard_lacks_is_refused(tmp_path: Path) -> None:
    saved("llama_untied", tmp_path)
    weight_map = shard(tmp_path)
    wrong = {**weight_map, NORM: next(file for file in weight_map.values() if file != weight_map[NORM])}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": wrong}))
    with pytest.raises(ConfigError, match=NORM):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"metadata": {}}'])
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    saved("llama_untied", tmp_path)
    shard(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["llama_untied", "gpt2_learned_positions"])
@pytest.mark.parametrize("keep", [0, 6, 200, -1])
def test_a_truncated_file_is_named(tmp_path: Path, name: str, keep: int) -> None:
    saved(name, tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    for entry in (lambda: locate_target(str(tmp_path)), lambda: load(tmp_path)):
        with pytest.raises(ConfigError, match="model") as caught:
            entry()
        assert str(tmp_path) in caught.value.message


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    tiny_config("llama", architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no safetensors file"):
        load(tmp_path)


def test_derived_buffers_of_old_exporters_are_no_weights(tmp_path: Path) -> None:
    saved("llama_untied", tmp_path)
    rewrite(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load(tmp_path)


def test_a_reader_marks_what_it_took(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {"a.x": torch.arange(3.0), "b.y": torch.zeros(2), "b.z": torch.zeros(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(str(tmp_path)) as checkpoint:
        assert checkpoint.names() == set(tensors)
        assert checkpoint.take("a.x", (3,)).tolist() == [0, 1, 2]
        with pytest.raises(ConfigError, match=r"unexpected tensor `b\.y` and 1 more"):
            checkpoint.finish()
        checkpoint.skip("b.")
        checkpoint.finish()
