"""Well-known public heads: their config.json and tensor names, with sizes divided by 64, load through resolve() unchanged."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdec.config.engine import EngineConfig, ModelConfig, ResolvedConfig
from specdec.config.methods import FINAL_NORM, Tap
from specdec.config.resolve import resolve
from specdec.config.speculative import build
from specdec.errors import ConfigError
from specdec.proposers.base import build_proposer
from specdec.proposers.eagle import EagleProposer
from tests.config.checkpoints import write_model
from tests.models.test_eagle import PagedHead, Target

VOCAB, DRAFT_VOCAB, WIDTH = 512, 128, 64
TARGETS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": WIDTH,
        "intermediate_size": 224,
        "num_hidden_layers": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": WIDTH,
        "intermediate_size": 192,
        "num_hidden_layers": 36,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
    },
}
LAYER = {
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
}
PROPOSALS = [{"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}]


def _speculators(verifier: str, architecture: str, layer: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": DRAFT_VOCAB,
        "has_no_defaults_at_init": False,
        "norm_before_residual": True,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": PROPOSALS,
            "verifier": {"architectures": [architecture], "name_or_path": verifier},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "target_hidden_size": None,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": {**LAYER, "model_type": "llama", "attention_bias": False, "mlp_bias": False, "head_dim": 16, **layer},
    }


# directory name -> (target, config.json, intermediate size, extra tensors, whether weights are a pytorch_model.bin)
PUBLISHED: dict[str, tuple[str, dict[str, Any], int, tuple[str, ...], bool]] = {
    "EAGLE-LLaMA3.1-Instruct-8B": (
        "llama-3.1-8b",
        {
            **LAYER,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "bias": False,
            "intermediate_size": 224,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
            "torch_dtype": "float16",
        },
        224,
        ("embed_tokens.weight",),
        True,
    ),
    "EAGLE3-LLaMA3.1-Instruct-8B": (
        "llama-3.1-8b",
        {
            **LAYER,
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "intermediate_size": 224,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "draft_vocab_size": DRAFT_VOCAB,
            "pad_token_id": 0,
            "torch_dtype": "float16",
        },
        224,
        (),
        True,
    ),
    "Llama-3.1-8B-Instruct-speculator.eagle3": (
        "llama-3.1-8b",
        _speculators(
            "meta-llama/Llama-3.1-8B-Instruct",
            "LlamaForCausalLM",
            {
                "intermediate_size": 224,
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131072,
                "rope_theta": 500000.0,
                "rope_scaling": TARGETS["llama-3.1-8b"]["rope_scaling"],
            },
        ),
        224,
        ("embed_tokens.weight",),
        False,
    ),
    "qwen3_8b_eagle3": (
        "qwen3-8b",
        {
            **LAYER,
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "head_dim": 16,
            "attention_bias": False,
            "intermediate_size": 192,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": 36,
            "draft_vocab_size": DRAFT_VOCAB,
        },
        192,
        (),
        True,
    ),
    "Qwen3-8B-speculator.eagle3": (
        "qwen3-8b",
        _speculators(
            "Qwen/Qwen3-8B",
            "Qwen3ForCausalLM",
            {"intermediate_size": 192, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "rope_theta": 1000000.0},
        ),
        192,
        ("embed_tokens.weight",),
        False,
    ),
}


def tensors_of(name: str) -> dict[str, torch.Tensor]:
    """Random tensors under the published names."""
    _, config, mlp, extra, _ = PUBLISHED[name]
    is_eagle = "draft_vocab_size" not in config
    layer = "layers.0" if is_eagle or "speculators_model_type" in config else "midlayer"
    wide = WIDTH if is_eagle else 2 * WIDTH
    shapes = {f"{layer}.self_attn.{x}_proj.weight": (size, wide) for x, size in (("q", 64), ("k", 16), ("v", 16))}
    shapes |= {f"{layer}.self_attn.o_proj.weight": (WIDTH, 64), f"{layer}.post_attention_layernorm.weight": (WIDTH,)}
    shapes |= {f"{layer}.mlp.{x}_proj.weight": (mlp, WIDTH) for x in ("gate", "up")} | {f"{layer}.mlp.down_proj.weight": (WIDTH, mlp)}
    shapes |= dict.fromkeys(extra, (VOCAB, WIDTH))
    shapes["fc.weight"] = (WIDTH, 2 * WIDTH if is_eagle else 3 * WIDTH)
    if not is_eagle:
        shapes |= {f"{layer}.{x}.weight": (WIDTH,) for x in ("input_layernorm", "hidden_norm")}
        shapes |= {"norm.weight": (WIDTH,), "lm_head.weight": (DRAFT_VOCAB, WIDTH)}
    generator = torch.Generator().manual_seed(2)
    tensors = {key: 0.1 * torch.randn(shape, generator=generator).to(torch.float16) for key, shape in shapes.items()}
    if not is_eagle:
        ids = torch.arange(0, VOCAB, 4)
        tensors |= {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)}
    return tensors


def write_published(path: Path, name: str) -> Path:
    _, config, _, _, is_torch = PUBLISHED[name]
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if is_torch:
        torch.save(tensors_of(name), path / "pytorch_model.bin")
    else:
        save_file(tensors_of(name), path / "model.safetensors")
    return path


def resolved_with(tmp_path: Path, target: str, spec: dict[str, Any]) -> ResolvedConfig:
    model = write_model(tmp_path / "target", TARGETS[target])
    model_config = ModelConfig(model=model, dtype="float32", max_model_len=128)  # the target's weights are not read here
    engine = EngineConfig(model=model_config, speculative=build(spec), device="cpu")
    return resolve(engine)


@torch.inference_mode()
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_public_head_loads_by_its_name_alone(tmp_path: Path, name: str) -> None:
    target, config, *_ = PUBLISHED[name]
    path = write_published(tmp_path / name, name)
    spec: dict[str, Any] = {"model": str(path)}
    if "speculators_model_type" not in config:
        spec["num_speculative_tokens"] = 5
    resolved = resolved_with(tmp_path, target, spec)
    assert resolved.traits is not None
    is_eagle = name.startswith("EAGLE-")
    layers: tuple[Tap, ...] = (2, 16, 29) if target.startswith("llama") else (2, 18, 33)
    assert (resolved.traits.method, resolved.traits.taps) == (("eagle", (FINAL_NORM,)) if is_eagle else ("eagle3", layers))
    assert resolved.traits.max_nodes == 5
    proposer = build_proposer(resolved)
    assert isinstance(proposer, EagleProposer)
    head = proposer.head
    assert head is not None
    assert (head.id_map is None) == is_eagle
    head.attach(Target(vocab=VOCAB, width=WIDTH))
    features = head.combine({tap: torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)) for tap in resolved.traits.taps})
    logits = head.compute_logits(PagedHead(head).feed([3, 4, 5], features, start=0).scored)
    assert logits.shape == (3, VOCAB if is_eagle else DRAFT_VOCAB)
    assert bool(logits.isfinite().all())
    assert head.num_bytes == 4 * sum(
        x.numel()
        for key, x in tensors_of(name).items()
        if x.ndim > 1 and ("proj" in key or "fc" in key or "lm_head" in key or "embed" in key)
    )


def test_the_wrong_pair_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = write_published(tmp_path / "EAGLE3-LLaMA3.1-Instruct-8B", "EAGLE3-LLaMA3.1-Instruct-8B")
    wide = {**TARGETS["qwen3-8b"], "hidden_size": 80}
    model = write_model(tmp_path / "wide", wide)
    spec = build({"model": str(path), "num_speculative_tokens": 2})
    engine = EngineConfig(model=ModelConfig(model=model, dtype="float32"), speculative=spec, device="cpu")
    with pytest.raises(ConfigError, match="draft hidden size 64 differs from target hidden size 80"):
        resolve(engine)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"not a pickle", "cannot read"), ([1, 2], "holds a list"), ({"fc.weight": torch.ones(2), "epoch": 3}, "holds 'epoch'")],
)
def test_a_damaged_pytorch_file_is_named(tmp_path: Path, content: Any, words: str) -> None:
    name = "EAGLE3-LLaMA3.1-Instruct-8B"
    file = write_published(tmp_path / name, name) / "pytorch_model.bin"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    resolved = resolved_with(tmp_path, "llama-3.1-8b", {"model": str(file.parent), "num_speculative_tokens": 2})
    with pytest.raises(ConfigError, match=words):
        build_proposer(resolved)


def test_pickled_code_does_not_run(tmp_path: Path) -> None:
    name = "EAGLE3-LLaMA3.1-Instruct-8B"
    file = write_published(tmp_path / name, name) / "pytorch_model.bin"
    torch.save({"fc.weight": _Harmful(str(tmp_path / "ran"))}, file, pickle_module=pickle)
    resolved = resolved_with(tmp_path, "llama-3.1-8b", {"model": str(file.parent), "num_speculative_tokens": 2})
    with pytest.raises(ConfigError, match="cannot read"):
        build_proposer(resolved)
    assert not (tmp_path / "ran").exists()


class _Harmful:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)
