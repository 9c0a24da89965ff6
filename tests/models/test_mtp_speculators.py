"""MTP modules in checkpoints of their own, as the speculators library writes them: its logits, and drafts of an engine over it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from specdec.config.checkpoints import draft_hf_config
from specdec.config.compatibility import flatten
from specdec.config.engine import CacheConfig, EngineConfig, ModelConfig, ResolvedConfig
from specdec.config.resolve import resolve
from specdec.config.speculative import build
from specdec.errors import ConfigError
from specdec.models.draft_head import HeadSetting
from specdec.models.loader import Checkpoint
from specdec.models.mtp import MtpModel, first_module
from specdec.proposers.base import build_proposer
from tests.config.checkpoints import write_tokenizer
from tests.models.test_eagle import PagedHead
from tests.proposers.tiny import mixed_requests, plain, run, write_checkpoint

BASE = "mtp_layers.0."
IDS = [3, 1, 9, 4, 7, 0]
# What speculators 0.9.0 (MTPDraftModel over Qwen3 layers) gives for SMALL, its first step over the first 4 rows of IDS and `states`.
EXPECTED: list[list[float]] = [
    [0.0869, -1.2904, -1.4075, -0.15, 1.2539, 1.4333, 0.2129, -1.2154, -1.4568, -0.2755, 1.1749],
    [1.3472, 1.4656, 0.1527, -1.3093, -1.4927, -0.2183, 1.2693, 1.5173, 0.2836, -1.2271, -1.5394],
    [-0.7155, -1.981, -1.312, 0.6384, 1.9653, 1.3729, -0.5602, -1.9462, -1.4316, 0.4812, 1.924],
    [-0.2432, -1.3056, -1.093, 0.187, 1.2844, 1.1275, -0.1306, -1.2611, -1.16, 0.0739, 1.2357],
]


def sizes(*, width: int, mlp: int, heads: int, kv_heads: int, head_dim: int, layers: int, vocab: int) -> dict[str, Any]:
    """transformer_layer_config, of which the library writes all keys of the target's."""
    return {
        "attention_bias": False, "head_dim": head_dim, "hidden_act": "silu", "hidden_size": width, "intermediate_size": mlp,
        "layer_types": ["full_attention"] * layers, "max_position_embeddings": 128, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": heads, "num_hidden_layers": layers, "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": vocab,
    }  # fmt: skip


SMALL = sizes(width=8, mlp=12, heads=2, kv_heads=1, head_dim=4, layers=2, vocab=11)
TINY = sizes(width=32, mlp=48, heads=4, kv_heads=2, head_dim=8, layers=2, vocab=97)


def pattern(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers that depend on a tensor's name and shape alone."""
    count = torch.Size(shape).numel()
    wave = 0.8 * torch.cos(torch.arange(count, dtype=torch.float64) * 1.7 + len(name)).float().view(shape)
    return 1 + 0.3 * wave if "norm" in name else wave


def module_weights(layer: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A module under the library's names."""
    width, mlp, size = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    q, kv = layer["num_attention_heads"] * size, layer["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "input_proj": (width, 2 * width), "self_attn.q_proj": (q, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, q), "self_attn.q_norm": (size,), "self_attn.k_norm": (size,), "mlp.gate_proj": (mlp, width),
        "mlp.up_proj": (mlp, width), "mlp.down_proj": (width, mlp),
    }  # fmt: skip
    for name in ("input_layernorm", "post_attention_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm"):
        shapes[name] = (width,)
    return {f"{BASE}{name}.weight": pattern(f"{BASE}{name}.weight", shape) for name, shape in shapes.items()}


def write_module(path: Path, layer: dict[str, Any], more: dict[str, torch.Tensor] | None = None, *, drop: str = "") -> Path:
    """Write a checkpoint as the library's save_pretrained does."""
    path.mkdir()
    save_file({name: x for name, x in (module_weights(layer) | (more or {})).items() if name != drop}, path / "model.safetensors")
    proposal = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    verifier = {"architectures": ["Qwen3ForCausalLM"], "name_or_path": None}
    config = {
        "architectures": ["MTPDraftModel"],
        "num_nextn_predict_layers": 1,
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "speculators_model_type": "mtp",
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def states(rows: int, width: int) -> torch.Tensor:
    """The target's last states of the fixture."""
    return pattern("states", (rows, width))


class Tables:
    """The fixture's target: an embedding and a head."""

    def embed_tokens(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, pattern("embed_tokens", (11, 8)))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ pattern("lm_head", (11, 8)).T


def load(path: Path) -> MtpModel:
    keys = flatten(json.loads((path / "config.json").read_text()))
    setting = HeadSetting(dtype=torch.float32, device=torch.device("cpu"), max_model_len=64, taps=(2,), target_width=8, vocab_size=11)
    with Checkpoint(str(path)) as checkpoint:
        model = first_module(draft_hf_config(str(path), keys), checkpoint, setting)
        checkpoint.finish()
    return model


@torch.inference_mode()
@pytest.mark.parametrize("more", [{}, {"verifier_lm_head.weight": torch.ones(11, 8)}], ids=["lean", "with the target's head"])
def test_logits_are_those_of_the_library(tmp_path: Path, more: dict[str, torch.Tensor]) -> None:
    model = load(write_module(tmp_path / "module", SMALL, more))
    model.attach(Tables())
    made = PagedHead(model).feed(IDS[1:5], states(6, 8)[:4], start=0)
    torch.testing.assert_close(model.compute_logits(made.scored), torch.tensor(EXPECTED), atol=2e-4, rtol=0)


def engine_over(tmp_path: Path, module: Path, spec: dict[str, Any] | None = None) -> ResolvedConfig:
    target = tmp_path / "target"
    if not target.exists():
        write_checkpoint(target, seed=1)
        write_tokenizer(target, ("<unk>", "<eos>", *(f"w{i}" for i in range(95))))
    engine = EngineConfig(
        model=ModelConfig(model=str(target), dtype="float32", max_model_len=96),
        cache=CacheConfig(block_size=4, num_blocks=200),
        speculative=build({"model": str(module), **(spec or {})}),
        device="cpu",
    )
    return resolve(engine)


def test_the_method_and_its_length_are_read_from_the_checkpoint_and_text_stays_the_same(tmp_path: Path) -> None:
    resolved = engine_over(tmp_path, write_module(tmp_path / "module", TINY))
    assert resolved.traits is not None
    assert (resolved.traits.method, resolved.traits.max_nodes, resolved.traits.taps) == (
        "mtp",
        3,
        (2,),
    )
    result = run(resolved, mixed_requests())
    assert result.token_ids == plain(tmp_path / "target", mixed_requests())
    assert result.num_drafted() > 100


@pytest.mark.parametrize(
    ("layer", "more", "drop", "message"),
    [
        (TINY, {}, f"{BASE}self_attn.k_norm.weight", r"self_attn\.k_norm"),
        (TINY, {}, f"{BASE}input_proj.weight", "no MTP module of a known family"),
        (TINY, {"t2d": torch.ones(97)}, "", "unexpected tensor `t2d`"),
        (TINY | {"hidden_size": 48}, {}, "", "draft hidden size 48 differs from target hidden size 32"),
        (TINY | {"vocab_size": 101}, {}, "", "draft vocabulary 101 differs from target vocabulary 97"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, layer: dict[str, Any], more: dict[str, torch.Tensor], drop: str, message: str
) -> None:
    module = write_module(tmp_path / "module", layer, more, drop=drop)
    with pytest.raises(ConfigError, match=message):
        build_proposer(engine_over(tmp_path, module))
