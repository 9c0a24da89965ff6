"""Published Medusa heads and MLP speculators: their config.json, file and tensor names, with sizes divided, load through resolve()."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdec.config.engine import EngineConfig, ModelConfig, ResolvedConfig
from specdec.config.resolve import resolve
from specdec.config.speculative import build
from specdec.errors import ConfigError
from specdec.proposers.base import build_proposer
from specdec.proposers.hidden_head import HiddenHeadProposer
from tests.config.checkpoints import write_model
from tests.models.test_eagle_published import TARGETS, VOCAB, WIDTH

INNER = 48  # 3072 of 4096
Shapes = dict[str, tuple[int, ...]]


def medusa(heads: int, *, layers: int = 1, bias: bool = True) -> Shapes:
    """The authors' names: residual blocks, then an output matrix, by head."""
    shapes: Shapes = {f"{h}.{block}.linear.weight": (WIDTH, WIDTH) for h in range(heads) for block in range(layers)}
    shapes |= {f"{h}.{block}.linear.bias": (WIDTH,) for h in range(heads) for block in range(layers) if bias}
    return shapes | {f"{h}.{layers}.weight": (VOCAB, WIDTH) for h in range(heads)}


def vllm_medusa(heads: int) -> Shapes:
    return {f"blocks.{h}.layers.0.weight": (WIDTH, WIDTH) for h in range(heads)} | {
        f"lm_heads.{h}.weight": (VOCAB, WIDTH) for h in range(heads)
    }


def accelerator(steps: int, *, ties: bool) -> Shapes:
    """IBM's names; a tied checkpoint stores a step's tensors once, and the first projection by itself."""
    shapes: Shapes = {}
    for step in range(2 if ties else steps):
        shapes[f"speculator.proj.{step}.weight"] = (INNER, INNER if step else WIDTH)
        if step == 0 or not ties:
            shapes |= {f"speculator.{part}.{step}.weight": (VOCAB, INNER) for part in ("emb", "head")}
            shapes |= {f"speculator.ln.{step}.{kind}": (INNER,) for kind in ("weight", "bias")}
    return shapes


def accelerator_config(steps: int, *, ties: bool) -> dict[str, Any]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "emb_dim": WIDTH,
        "inner_dim": INNER,
        "model_type": "mlp_speculator",
        "n_candidates": 4,
        "n_predict": steps,
        "scale_input": ties,
        "tie_weights": ties,
        "top_k_tokens_per_head": [4, 3, 2, 2][:steps],
        "torch_dtype": "float16",
        "transformers_version": "4.38.2",
        "vocab_size": VOCAB,
    }


@dataclass(frozen=True)
class Published:
    """config.json, tensors, the file they are in, and how many drafts the weights allow."""

    config: dict[str, Any]
    shapes: Shapes
    file: str
    heads: int
    method: str = "medusa"


_VICUNA = {
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "transformers_version": "4.31.0",
}
_LLAMA = {"base_model_name_or_path": "meta-llama/Llama-3.1-8B-Instruct", "medusa_num_heads": 3, "medusa_num_layers": 1}
_VLLM = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 5, "num_hidden_layers": 1, "hidden_size": WIDTH}
_VLLM |= {"vocab_size": VOCAB, "max_paths": 64, "topk": 10, "truncated_vocab_size": VOCAB}
PUBLISHED = {
    "medusa-vicuna-7b-v1.3": Published(_VICUNA, medusa(5), "medusa_lm_head.pt", 5),
    "medusa-llama-3.1-8b": Published(_LLAMA, medusa(3, bias=False), "medusa_lm_head.safetensors", 3),
    "vllm-medusa-vicuna-7b-v1.3": Published(_VLLM, vllm_medusa(5), "model.safetensors", 5),
    "llama3-8b-accelerator": Published(
        accelerator_config(4, ties=True), accelerator(4, ties=True), "model.safetensors", 4, "mlp_speculator"
    ),
    "llama-13b-accelerator": Published(
        accelerator_config(3, ties=False), accelerator(3, ties=False), "model.safetensors", 3, "mlp_speculator"
    ),
}


def write_published(path: Path, name: str) -> Path:
    given = PUBLISHED[name]
    path.mkdir()
    (path / "config.json").write_text(json.dumps(given.config))
    tensors = {key: torch.full(shape, 0.01, dtype=torch.float16) for key, shape in given.shapes.items()}
    if given.file.endswith(".pt"):
        torch.save(tensors, path / given.file)
    else:
        save_file(tensors, path / given.file)
    return path


def resolved_with(tmp_path: Path, head: Path, *, width: int = WIDTH, **spec: Any) -> ResolvedConfig:
    model = write_model(tmp_path / "target", {**TARGETS["llama-3.1-8b"], "hidden_size": width})
    engine = EngineConfig(
        model=ModelConfig(model=model, dtype="float32", max_model_len=128), speculative=build({"model": str(head), **spec}), device="cpu"
    )
    return resolve(engine)


@pytest.mark.parametrize("name", PUBLISHED)
def test_public_heads_load_by_their_directory_alone(tmp_path: Path, name: str) -> None:
    given = PUBLISHED[name]
    resolved = resolved_with(tmp_path, write_published(tmp_path / name, name), num_speculative_tokens=given.heads)
    assert resolved.traits is not None
    assert (resolved.traits.method, resolved.traits.max_nodes) == (given.method, given.heads)
    proposer = build_proposer(resolved)
    assert isinstance(proposer, HiddenHeadProposer)
    head = proposer.head
    assert head is not None
    assert head.num_heads == given.heads
    matrices = sum(shape[0] * shape[1] for shape in given.shapes.values() if len(shape) == 2)
    assert head.num_bytes == 4 * matrices
    state = head.begin(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1)))
    for index in range(given.heads):
        logits, state = head.step(index, state, torch.tensor([3, 4]))
        assert logits.shape == (2, VOCAB)
        assert bool(logits.isfinite().all())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("medusa-vicuna-7b-v1.3", "num_speculative_tokens is 6, but the draft checkpoint has 5 heads"),
        ("vllm-medusa-vicuna-7b-v1.3", "num_heads 5, so it must be at most 5"),
        ("llama3-8b-accelerator", "n_predict 4, so it must be at most 4"),
    ],
)
def test_more_drafts_than_heads_are_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_proposer(resolved_with(tmp_path, write_published(tmp_path / name, name), num_speculative_tokens=6))


@pytest.mark.parametrize("name", ["medusa-vicuna-7b-v1.3", "llama3-8b-accelerator"])
def test_heads_of_another_width_are_refused_with_both_numbers(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"64 differs from target hidden size 80"):
        build_proposer(resolved_with(tmp_path, write_published(tmp_path / name, name), width=80, num_speculative_tokens=2))
