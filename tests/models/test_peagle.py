"""P-EAGLE heads as the speculators library writes them: its logits at committed rows and at masks, and what resolve() makes of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specdec.config.checkpoints import draft_hf_config
from specdec.config.compatibility import flatten
from specdec.config.engine import EngineConfig, ModelConfig
from specdec.config.resolve import resolve
from specdec.config.speculative import build
from specdec.models.draft_head import HeadSetting
from specdec.models.loader import Checkpoint
from specdec.models.peagle import PEagleModel
from specdec.proposers.base import build_proposer
from specdec.proposers.parallel_head import ParallelHeadProposer
from tests.config.checkpoints import write_tokenizer
from tests.models.test_eagle import PagedHead
from tests.models.test_mtp_speculators import pattern
from tests.proposers.tiny import mixed_requests, plain, run, write_checkpoint

IDS, MASK, MASKS, TAPS = [3, 1, 9], 10, 2, (0, 1, 2)
# What speculators 0.9.0 (PEagleDraftModel over Llama layers) gives for SMALL: three rows of depth 0, then depths 1 and 2 of the last.
EXPECTED: list[list[float]] = [
    [0.2837, 0.4185, 0.1445, -0.2706, -0.4214, -0.1607, 0.2569, 0.4237, 0.1766, -0.2429, -0.4252],
    [0.0491, 0.6896, 0.6567, -0.0176, -0.6747, -0.6729, -0.0139, 0.6586, 0.688, 0.0455, -0.6414],
    [0.1362, -0.2892, -0.4322, -0.1531, 0.2755, 0.435, 0.1697, -0.2613, -0.4372, -0.1861, 0.2467],
    [0.6468, 0.6358, 0.0038, -0.6319, -0.6505, -0.0338, 0.6159, 0.6641, 0.0638, -0.5988, -0.6766],
    [0.6455, 0.6315, 0.0008, -0.6307, -0.6462, -0.0307, 0.6149, 0.6599, 0.0605, -0.598, -0.6725],
]


def layers(*, width: int, mlp: int, heads: int, kv_heads: int, head_dim: int, vocab: int) -> dict[str, Any]:
    """transformer_layer_config of a head with two layers."""
    return {
        "attention_bias": False, "head_dim": head_dim, "hidden_act": "silu", "hidden_size": width, "intermediate_size": mlp,
        "max_position_embeddings": 128, "mlp_bias": False, "model_type": "llama", "num_attention_heads": heads, "num_hidden_layers": 2,
        "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False, "vocab_size": vocab,
    }  # fmt: skip


SMALL = layers(width=8, mlp=12, heads=2, kv_heads=1, head_dim=4, vocab=11)
TINY = layers(width=32, mlp=48, heads=4, kv_heads=2, head_dim=8, vocab=97)


def head_weights(layer: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A head under the library's names."""
    width, mlp, size = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    q, kv, vocab = layer["num_attention_heads"] * size, layer["num_key_value_heads"] * size, layer["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, 3 * width), "norm.weight": (width,), "mask_hidden": (1, 1, 3 * width)}
    shapes |= {"embed_tokens.weight": (vocab, width), "lm_head.weight": (vocab, width), "layers.0.hidden_norm.weight": (width,)}
    for index in range(2):
        base, wide = f"layers.{index}.", width if index else 2 * width
        shapes |= {f"{base}self_attn.{x}_proj.weight": (rows, wide) for x, rows in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {f"{base}self_attn.o_proj.weight": (width, q), f"{base}mlp.down_proj.weight": (width, mlp)}
        shapes |= {f"{base}mlp.{x}_proj.weight": (mlp, width) for x in ("gate", "up")}
        shapes |= {f"{base}{x}.weight": (width,) for x in ("input_layernorm", "post_attention_layernorm")}
    return {name: pattern(name, shape) for name, shape in shapes.items()}


def write(path: Path, layer: dict[str, Any], mask: int) -> Path:
    """Write a checkpoint as the library's save_pretrained does."""
    path.mkdir()
    save_file(head_weights(layer), path / "model.safetensors")
    proposal = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1}
    config = {
        "architectures": ["PEagleDraftModel"], "draft_vocab_size": layer["vocab_size"], "eagle_aux_hidden_state_layer_ids": list(TAPS),
        "embed_requires_grad": True, "fc_norm": False, "mask_token_id": mask, "norm_before_fc": False, "norm_before_residual": False,
        "norm_output": False, "speculators_config": {"algorithm": "peagle", "default_proposal_method": "greedy",
        "proposal_methods": [proposal], "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None}},
        "speculators_model_type": "peagle", "speculators_version": "0.9.0", "target_hidden_size": None, "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


@torch.inference_mode()
def test_logits_are_those_of_the_library(tmp_path: Path) -> None:
    path = write(tmp_path / "head", SMALL, MASK)
    keys = flatten(json.loads((path / "config.json").read_text()))
    setting = HeadSetting(dtype=torch.float32, device=torch.device("cpu"), max_model_len=64, taps=TAPS, target_width=8, vocab_size=11)
    with Checkpoint(str(path)) as checkpoint:
        head = PEagleModel(draft_hf_config(str(path), keys), checkpoint, setting)
        checkpoint.finish()
    features = head.combine({tap: pattern(f"state {'x' * tap}", (len(IDS), 8)) for tap in TAPS})
    features = torch.cat([features, head.mask_feature().expand(MASKS, -1)])
    made = PagedHead(head).feed([*IDS, *[head.mask_token_id] * MASKS], features, start=0)
    torch.testing.assert_close(head.compute_logits(made.scored), torch.tensor(EXPECTED), atol=2e-4, rtol=0)


def test_its_directory_alone_says_everything(tmp_path: Path) -> None:
    """Method, length and the one pass are read from the checkpoint; text stays what plain decoding gives."""
    target = write_checkpoint(tmp_path / "target", seed=1)
    write_tokenizer(target, ("<unk>", "<eos>", *(f"w{i}" for i in range(95))))
    spec = build({"model": str(write(tmp_path / "head", TINY, 90))})
    resolved = resolve(
        EngineConfig(model=ModelConfig(model=str(target), dtype="float32", max_model_len=96), speculative=spec, device="cpu")
    )
    assert resolved.traits is not None
    assert (resolved.traits.method, resolved.traits.max_nodes, resolved.traits.draft_slots) == ("eagle3", 4, 3)
    assert isinstance(build_proposer(resolved), ParallelHeadProposer)
    result = run(resolved, mixed_requests())
    assert result.token_ids == plain(target, mixed_requests())
    assert result.num_drafted() > 100
