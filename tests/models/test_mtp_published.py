"""MTP modules of published models by their config.json and tensor names, with sizes divided, from resolve() to emitted tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, SmolLM3Config

from specdec.config.engine import CacheConfig, EngineConfig, ModelConfig, ResolvedConfig
from specdec.config.resolve import resolve
from specdec.config.speculative import build
from specdec.errors import ConfigError
from specdec.proposers.base import build_proposer
from tests.config.checkpoints import write_model, write_tokenizer
from tests.proposers.tiny import prompts, request, run

VOCAB, WIDTH, MLP, HEADS, KV_HEADS, LAYERS = 97, 64, 172, 8, 2, 3  # MiMo-7B has 151680, 4096, 11008, 32, 8, 36
MIMO: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig", "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"},
    "attention_bias": True,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": MLP,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "model_type": "mimo",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 640000,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}


def module_shapes(base: str) -> dict[str, tuple[int, ...]]:
    """A module of MiMo's, biases of q, k and v included."""
    sizes = {"q": WIDTH, "k": KV_HEADS * 8, "v": KV_HEADS * 8}
    shapes: dict[str, tuple[int, ...]] = {f"{base}self_attn.{x}_proj.weight": (size, WIDTH) for x, size in sizes.items()}
    shapes |= {f"{base}self_attn.{x}_proj.bias": (size,) for x, size in sizes.items()}
    shapes |= {f"{base}self_attn.o_proj.weight": (WIDTH, WIDTH), f"{base}mlp.down_proj.weight": (WIDTH, MLP)}
    shapes |= {f"{base}mlp.{x}_proj.weight": (MLP, WIDTH) for x in ("gate", "up")}
    norms = ("input_layernorm", "post_attention_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm")
    return shapes | {f"{base}{x}.weight": (WIDTH,) for x in norms} | {f"{base}input_proj.weight": (WIDTH, 2 * WIDTH)}


def write_mimo(path: Path) -> Qwen2ForCausalLM:
    """Write a small MiMo with its module and return transformers' model of the same layers."""
    config = Qwen2Config(**{key: value for key, value in MIMO.items() if key not in ("model_type", "auto_map", "transformers_version")})
    config.initializer_range = 0.3
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = Qwen2ForCausalLM(config).eval()
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(path)
    generator = torch.Generator().manual_seed(8)
    module = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in module_shapes("model.mtp_layers.0.").items()}
    module = {name: 1 + weight if "norm" in name else weight for name, weight in module.items()}
    save_file(load_file(path / "model.safetensors") | module, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(MIMO))
    write_tokenizer(path, ("<unk>", "<eos>", *(f"w{i}" for i in range(VOCAB - 2))))
    return model


def resolved_for(path: Path, spec: dict[str, Any] | None) -> ResolvedConfig:
    engine = EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", max_model_len=96),
        cache=CacheConfig(block_size=4, num_blocks=200),
        speculative=None if spec is None else build(spec),
        device="cpu",
    )
    return resolve(engine)


@torch.no_grad()
def test_mimo_is_served_as_published_and_its_module_drafts(tmp_path: Path) -> None:
    """No code of the checkpoint is run for it; what is emitted is transformers' greedy text of the same layers."""
    model = write_mimo(tmp_path / "MiMo-7B-RL")
    resolved = resolved_for(tmp_path / "MiMo-7B-RL", {"method": "mtp", "num_speculative_tokens": 3})
    assert resolved.traits is not None
    assert (resolved.traits.taps, resolved.traits.max_nodes) == ((LAYERS,), 3)
    requests = [request(f"r{i}", text, max_tokens=16) for i, text in enumerate(prompts(3, seed=5, longest=12))]
    result = run(resolved, requests)
    for one in requests:
        ids = list(one.prompt_token_ids)
        for _ in range(16):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert result.token_ids[one.request_id] == ids[-16:]
    assert result.num_drafted() > 40


def test_a_depth_is_taken_from_the_checkpoint(tmp_path: Path) -> None:
    write_mimo(tmp_path / "MiMo")
    resolved = resolved_for(tmp_path / "MiMo", {"method": "mtp"})
    assert resolved.traits is not None
    assert resolved.traits.max_nodes == 1


@torch.no_grad()
@pytest.mark.parametrize("kind", ["windows", "no_rope"])
def test_a_module_behind_layers_that_differ_has_full_attention_with_positions(tmp_path: Path, kind: str) -> None:
    """Its number is past the layers that the config lists one by one."""
    path = tmp_path / kind
    if kind == "windows":
        keys = {key: value for key, value in MIMO.items() if key not in ("model_type", "auto_map", "transformers_version")}
        keys |= {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "architectures": ["Qwen2ForCausalLM"]}
        config: Any = Qwen2Config(**keys)
        assert config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    else:
        sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-5}
        config = SmolLM3Config(
            **sizes, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, no_rope_layers=[1, 0, 1], bos_token_id=0, eos_token_id=1,
            pad_token_id=0, num_nextn_predict_layers=1,
        )  # fmt: skip
    config.initializer_range = 0.3
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(path)
    base = f"model.layers.{LAYERS}."
    renamed = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
    generator, module = torch.Generator().manual_seed(8), {}
    for name, shape in module_shapes(base).items():
        weight = 0.2 * torch.randn(shape, generator=generator)
        part = name.removeprefix(base).removesuffix(".weight")
        module[f"{base}{renamed.get(part, part)}" + ("" if part.endswith(".bias") else ".weight")] = (
            1 + weight if "norm" in name else weight
        )
    save_file(load_file(path / "model.safetensors") | module, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    write_tokenizer(path, ("<unk>", "<eos>", *(f"w{i}" for i in range(VOCAB - 2))))
    requests = [request(f"r{i}", text, max_tokens=16) for i, text in enumerate(prompts(3, seed=5, longest=12))]
    resolved = resolved_for(path, {"method": "mtp", "num_speculative_tokens": 3})
    proposer: Any = build_proposer(resolved)
    attention = proposer.head.layer.attention
    assert (attention.window, attention.has_rope) == (None, True)
    result = run(resolved, requests)
    assert result.token_ids == run(resolved_for(path, None), requests).token_ids
    assert result.num_drafted() > 40


def test_modules_of_deepseek_v3_are_refused_by_what_they_are(tmp_path: Path) -> None:
    """Its module has latent attention and experts; neither is built."""
    keys = {"num_nextn_predict_layers": 1, "num_hidden_layers": 2}
    path = Path(write_model(tmp_path / "DeepSeek-V3", keys))
    base = "model.layers.2."
    names = ("enorm", "hnorm", "eh_proj", "self_attn.kv_a_proj_with_mqa", "mlp.experts.0.gate_proj", "shared_head.norm")
    sizes = {"eh_proj": (64, 128), "self_attn.kv_a_proj_with_mqa": (16, 64), "mlp.experts.0.gate_proj": (16, 64)}
    save_file({f"{base}{name}.weight": torch.ones(sizes.get(name, (64,))) for name in names}, path / "model.safetensors")
    resolved = resolved_for(path, {"method": "mtp"})
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.\* has latent attention"):
        build_proposer(resolved)


def test_modules_of_qwen3_5_are_refused_by_what_they_are(tmp_path: Path) -> None:
    """Queries of its attention carry a gate, so that q_proj has twice the rows."""
    path = Path(write_model(tmp_path / "Qwen3.5", {"mtp_num_hidden_layers": 1}))
    norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    sizes = {"mtp.fc": (64, 128), "mtp.layers.0.self_attn.q_proj": (128, 64), "mtp.layers.0.mlp.gate_proj": (128, 64)}
    save_file({f"{name}.weight": torch.ones(sizes.get(name, (64,))) for name in (*norms, *sizes)}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"mtp\.layers\.0\.\* has gated attention"):
        build_proposer(resolved_for(path, {"method": "mtp"}))
