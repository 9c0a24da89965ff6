"""Published heads that draft in one pass: their config.json and tensor names, with sizes divided, load through resolve() unchanged."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdec.config.engine import CacheConfig, EngineConfig, ModelConfig, ResolvedConfig
from specdec.config.resolve import resolve
from specdec.config.speculative import build
from specdec.errors import ConfigError
from specdec.proposers.base import build_proposer
from specdec.proposers.block import BlockProposer
from specdec.proposers.parallel_head import ParallelHeadProposer
from tests.config.checkpoints import write_model
from tests.models.test_eagle_published import DRAFT_VOCAB, LAYER, PROPOSALS, TARGETS, VOCAB, WIDTH, _speculators

MASK, RANK = VOCAB - 3, 8
Shapes = dict[str, tuple[int, ...]]
QWEN3: dict[str, Any] = {
    **LAYER,
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "head_dim": 16,
    "intermediate_size": 192,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "num_hidden_layers": 5,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": ["full_attention"] * 5,
}
QWEN3_TAPS, LLAMA_TAPS = (2, 10, 18, 26, 34), (2, 9, 16, 23, 30)


def layers_of(count: int, mlp: int, *, has_qk_norm: bool = True) -> Shapes:
    """Decoder layers of Qwen3's kind."""
    shapes: Shapes = {}
    for index in range(count):
        base = f"layers.{index}."
        shapes |= {f"{base}self_attn.{x}_proj.weight": (size, WIDTH) for x, size in (("q", 64), ("k", 16), ("v", 16))}
        shapes |= {f"{base}self_attn.o_proj.weight": (WIDTH, 64), f"{base}mlp.down_proj.weight": (WIDTH, mlp)}
        shapes |= {f"{base}mlp.{x}_proj.weight": (mlp, WIDTH) for x in ("gate", "up")}
        shapes |= {f"{base}{x}.weight": (WIDTH,) for x in ("input_layernorm", "post_attention_layernorm")}
        if has_qk_norm:
            shapes |= {f"{base}self_attn.{x}_norm.weight": (16,) for x in "qk"}
    return shapes


def block(count: int, mlp: int, *, reduced: bool = False) -> Shapes:
    """A DFlash backbone; a reduced vocabulary brings an embedding and an LM head."""
    shapes = layers_of(count, mlp) | {"fc.weight": (WIDTH, 5 * WIDTH), "hidden_norm.weight": (WIDTH,), "norm.weight": (WIDTH,)}
    return shapes | ({"embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (DRAFT_VOCAB, WIDTH)} if reduced else {})


def markov(vocab: int) -> Shapes:
    shapes: Shapes = {"markov_head.markov_w1.weight": (VOCAB, RANK), "markov_head.markov_w2.weight": (vocab, RANK)}
    return shapes | {"confidence_head.proj.weight": (1, WIDTH + RANK), "confidence_head.proj.bias": (1,)}


def peagle() -> Shapes:
    """Two layers, of which the first reads token and feature, with tables of its own."""
    shapes = layers_of(2, 224, has_qk_norm=False) | {
        f"layers.0.self_attn.{x}_proj.weight": (n, 2 * WIDTH) for x, n in (("q", 64), ("k", 16), ("v", 16))
    }
    shapes |= {"layers.0.hidden_norm.weight": (WIDTH,), "norm.weight": (WIDTH,), "fc.weight": (WIDTH, 3 * WIDTH)}
    return shapes | {"mask_hidden": (1, 1, 3 * WIDTH), "embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (DRAFT_VOCAB, WIDTH)}


def speculators(family: str, architecture: str, verifier: str, layer: dict[str, Any], drafts: int, **keys: Any) -> dict[str, Any]:
    config = _speculators(verifier, "Qwen3ForCausalLM", layer) | {"architectures": [architecture], "speculators_model_type": family}
    config["speculators_config"] = config["speculators_config"] | {
        "algorithm": family, "proposal_methods": [PROPOSALS[0] | {"speculative_tokens": drafts}]
    }  # fmt: skip
    return config | {"transformer_layer_config": layer, "mask_token_id": MASK, **keys}


@dataclass(frozen=True)
class Published:
    """Target, config.json, tensors, the method that is found, drafts, layers that are read, and whether ids are mapped."""

    target: str
    config: dict[str, Any]
    shapes: Shapes
    method: str
    drafts: int
    taps: tuple[int, ...]
    is_reduced: bool = False


_AUTO = {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "architectures": ["DFlashDraftModel"]}
_QWEN3_IDS, _LLAMA_IDS = [tap - 1 for tap in QWEN3_TAPS], [tap - 1 for tap in LLAMA_TAPS]
PUBLISHED = {
    "Qwen3-8B-DFlash-b16": Published(
        "qwen3-8b",
        QWEN3
        | _AUTO
        | {"block_size": 16, "num_target_layers": 36, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": _QWEN3_IDS}},
        block(5, 192),
        "dflash",
        15,
        QWEN3_TAPS,
    ),
    "LLaMA3.1-8B-Instruct-DFlash": Published(
        "llama-3.1-8b",
        QWEN3
        | _AUTO
        | {"block_size": 10, "num_target_layers": 32, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": _LLAMA_IDS}}
        | {"intermediate_size": 224, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": TARGETS["llama-3.1-8b"]["rope_scaling"]},
        block(5, 224),
        "dflash",
        9,
        LLAMA_TAPS,
    ),
    "Qwen3-8B-speculator.dflash": Published(
        "qwen3-8b",
        speculators("dflash", "DFlashDraftModel", "Qwen/Qwen3-8B", QWEN3, 7, aux_hidden_state_layer_ids=list(QWEN3_TAPS), block_size=8),
        block(5, 192, reduced=True),
        "dflash",
        7,
        QWEN3_TAPS,
        is_reduced=True,
    ),
    "dspark_qwen3_8b_block7": Published(
        "qwen3-8b",
        QWEN3
        | {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": MASK, "target_layer_ids": _QWEN3_IDS}
        | {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True},
        block(5, 192) | markov(VOCAB),
        "dspark",
        7,
        QWEN3_TAPS,
    ),
    "Qwen3-8B-speculator.dspark": Published(
        "qwen3-8b",
        speculators("dspark", "DSparkDraftModel", "Qwen/Qwen3-8B", QWEN3, 7, aux_hidden_state_layer_ids=list(QWEN3_TAPS), block_size=8)
        | {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True},
        block(5, 192, reduced=True) | markov(DRAFT_VOCAB),
        "dspark",
        7,
        QWEN3_TAPS,
        is_reduced=True,
    ),
    "Llama-3.1-8B-Instruct-speculator.peagle": Published(
        "llama-3.1-8b",
        speculators(
            "peagle",
            "PEagleDraftModel",
            "meta-llama/Llama-3.1-8B-Instruct",
            {**LAYER, "model_type": "llama", "attention_bias": False, "mlp_bias": False, "head_dim": 16, "num_hidden_layers": 2}
            | {"intermediate_size": 224, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0},
            6,
            eagle_aux_hidden_state_layer_ids=[2, 16, 29],
            norm_before_residual=False,
        ),
        peagle(),
        "eagle3",
        6,
        (2, 16, 29),
        is_reduced=True,
    ),
}


def write_published(path: Path, name: str, *, drop: str = "") -> Path:
    given = PUBLISHED[name]
    path.mkdir()
    (path / "config.json").write_text(json.dumps(given.config))
    generator = torch.Generator().manual_seed(2)
    tensors = {key: (0.1 * torch.randn(shape, generator=generator)).to(torch.float16) for key, shape in given.shapes.items()}
    if given.is_reduced:
        ids = torch.arange(0, VOCAB, 4)
        tensors |= {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)}
    save_file({key: tensor for key, tensor in tensors.items() if key != drop}, path / "model.safetensors")
    return path


def resolved_with(tmp_path: Path, target: str, spec: dict[str, Any], **changes: Any) -> ResolvedConfig:
    model = write_model(tmp_path / "-".join(("target", *changes)), TARGETS[target] | changes)
    model_config = ModelConfig(model=model, dtype="float32", max_model_len=128)  # the target's weights are not read here
    cache = CacheConfig(block_size=4, num_blocks=40)
    return resolve(EngineConfig(model=model_config, cache=cache, speculative=build(spec), device="cpu"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_public_head_loads_by_its_directory_alone(tmp_path: Path, name: str) -> None:
    """Its method, its drafts and the layers that it reads are found in the checkpoint, and every tensor is used."""
    given = PUBLISHED[name]
    path = write_published(tmp_path / name, name)
    resolved = resolved_with(tmp_path, given.target, {"model": str(path)})
    assert resolved.traits is not None
    assert (resolved.traits.method, resolved.traits.max_nodes, resolved.traits.taps) == (given.method, given.drafts, given.taps)
    proposer: Any = build_proposer(resolved)
    assert isinstance(proposer, ParallelHeadProposer if given.method == "eagle3" else BlockProposer)
    head: Any = proposer.head
    assert (head.id_map is not None) == given.is_reduced
    assert head.mask_token_id == MASK
    assert head.num_layers == sum(key.endswith("mlp.down_proj.weight") for key in given.shapes)
    counted = ("_proj.weight", "fc.weight", "lm_head.weight", "embed_tokens.weight", "markov_w1.weight", "markov_w2.weight")
    assert head.num_bytes == 4 * sum(a * b for key, (a, b, *_) in ((k, (*s, 1)) for k, s in given.shapes.items()) if key.endswith(counted))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    path = write_published(tmp_path / name, name, drop="layers.1.mlp.up_proj.weight")
    resolved = resolved_with(tmp_path, PUBLISHED[name].target, {"model": str(path)})
    with pytest.raises(ConfigError, match=r"`layers\.1\.mlp\.up_proj\.weight` is missing"):
        build_proposer(resolved)


@pytest.mark.parametrize("name", ["Qwen3-8B-DFlash-b16", "dspark_qwen3_8b_block7"])
def test_a_wrong_pair_is_refused_with_both_numbers(tmp_path: Path, name: str) -> None:
    spec = {"model": str(write_published(tmp_path / name, name))}
    with pytest.raises(ConfigError, match="draft hidden size 64 differs from target hidden size 80"):
        resolved_with(tmp_path, "qwen3-8b", spec, hidden_size=80)
    with pytest.raises(ConfigError, match="draft vocabulary 512 differs from target vocabulary 640"):
        resolved_with(tmp_path, "qwen3-8b", spec, vocab_size=640)
    with pytest.raises(ConfigError, match="34"):  # a layer that the target does not have
        resolved_with(tmp_path, "qwen3-8b", spec, num_hidden_layers=28)
