"""Medusa heads and MLP speculators written plainly from the papers, and small random checkpoints of them. Float32, whole texts.

Letters: H hidden, D inner width, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import LlamaForCausalLM

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class HiddenSpec:
    """A checkpoint by its sizes. style: whose names it has. ties: one set of weights for all steps. token_map: a truncated vocabulary."""

    method: str = "medusa"
    style: str = "fasterdecoding"  # or "vllm", "prefixed" (medusa_head.), "bare" (no output matrices); of mlp: "ibm", "prefixed"
    width: int = 32
    inner: int = 24
    vocab: int = 97
    num_heads: int = 4
    num_blocks: int = 1
    has_token_map: bool = False
    ties: bool = False
    scales_input: bool = False


def write_hidden_head(path: Path, spec: HiddenSpec, *, seed: int = 0, drop: Sequence[str] = (), more: Weights | None = None) -> Path:
    """Write a random checkpoint; `drop` leaves tensors out, `more` adds some."""
    path.mkdir(parents=True, exist_ok=True)
    weights = random_weights(spec, seed=seed)
    named = {rename(name, spec): tensor.contiguous().clone() for name, tensor in weights.items()} | (more or {})
    save_file({name: tensor for name, tensor in named.items() if name not in drop}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config_json(spec)), encoding="utf-8")
    return path


def random_weights(spec: HiddenSpec, *, seed: int = 0) -> Weights:
    """Weights under this file's own names: block.h.l, out.h, or emb.i, proj.i, head.i, ln.i."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (1.0 if len(shape) == 1 else 2.0 / math.sqrt(shape[-1]))

    weights: Weights = {}
    if spec.method == "medusa":
        ids = torch.randperm(spec.vocab, generator=generator)[:60].sort().values
        for h in range(spec.num_heads):
            for block in range(spec.num_blocks):
                weights |= {f"block.{h}.{block}.weight": noise(spec.width, spec.width), f"block.{h}.{block}.bias": noise(spec.width) * 0.1}
            if spec.style != "bare":
                weights[f"out.{h}.weight"] = noise(len(ids) if spec.has_token_map else spec.vocab, spec.width)
        return weights | ({"token_map": ids} if spec.has_token_map else {})
    for i in range(spec.num_heads):
        first = weights.get("emb.0.weight") is None or not spec.ties
        second = weights.get("proj.1.weight") is None or not spec.ties
        weights[f"emb.{i}.weight"] = noise(spec.vocab, spec.inner) if first else weights["emb.0.weight"]
        weights[f"head.{i}.weight"] = noise(spec.vocab, spec.inner) if first else weights["head.0.weight"]
        weights[f"ln.{i}.weight"] = 1 + 0.2 * noise(spec.inner) if first else weights["ln.0.weight"]
        weights[f"ln.{i}.bias"] = 0.2 * noise(spec.inner) if first else weights["ln.0.bias"]
        weights[f"proj.{i}.weight"] = noise(spec.inner, spec.inner if i else spec.width) if i == 0 or second else weights["proj.1.weight"]
    return weights


def rename(name: str, spec: HiddenSpec) -> str:
    """The publisher's name of a tensor."""
    if spec.method == "mlp_speculator":
        return f"speculator.{name}" if spec.style == "prefixed" else name
    kind, *rest = name.split(".")
    if kind == "token_map":
        return name
    if spec.style == "vllm":
        return f"blocks.{rest[0]}.layers.{rest[1]}.{rest[2]}" if kind == "block" else f"lm_heads.{rest[0]}.weight"
    prefix = "medusa_head." if spec.style == "prefixed" else ""
    return f"{prefix}{rest[0]}.{rest[1]}.linear.{rest[2]}" if kind == "block" else f"{prefix}{rest[0]}.{spec.num_blocks}.weight"


def config_json(spec: HiddenSpec) -> dict[str, Any]:
    """config.json as the publishers write it."""
    if spec.method == "mlp_speculator":
        sizes = {"emb_dim": spec.width, "inner_dim": spec.inner, "n_predict": spec.num_heads, "vocab_size": spec.vocab}
        flags = {"tie_weights": spec.ties, "scale_input": spec.scales_input, "n_candidates": 5, "top_k_tokens_per_head": [4, 3, 2, 2]}
        return {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", **sizes, **flags}
    if spec.style == "vllm":
        sizes = {"num_heads": spec.num_heads, "num_hidden_layers": spec.num_blocks, "hidden_size": spec.width, "vocab_size": spec.vocab}
        return {"architectures": ["MedusaModel"], "model_type": "medusa", **sizes}
    return {"base_model_name_or_path": "a-target", "medusa_num_heads": spec.num_heads, "medusa_num_layers": spec.num_blocks}


class PlainHiddenHead:
    """What the reference drafts behind a text."""

    def __init__(self, target: Path, spec: HiddenSpec, *, seed: int) -> None:
        self.spec, self.weights = spec, random_weights(spec, seed=seed)
        self.model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    @torch.no_grad()
    def drafts(self, text: Sequence[int], count: int) -> list[int]:
        """Greedy drafts behind the text, whose last token is the anchor."""
        hidden = self.model.model(input_ids=torch.tensor([list(text[:-1])]), use_cache=False).last_hidden_state[0, -1]
        return self.medusa(hidden, count) if self.spec.method == "medusa" else self.recurrence(hidden, text[-1], count)

    def medusa(self, hidden: torch.Tensor, count: int) -> list[int]:
        """Each head by itself: hidden [H]."""
        found = []
        for h in range(count):
            z = hidden
            for block in range(self.spec.num_blocks):
                y = self.weights[f"block.{h}.{block}.weight"] @ z + self.weights[f"block.{h}.{block}.bias"]
                z = z + y * torch.sigmoid(y)
            best = int((self.weights.get(f"out.{h}.weight", self.model.lm_head.weight) @ z).argmax())
            found.append(int(self.weights["token_map"][best]) if self.spec.has_token_map else best)
        return found

    def recurrence(self, hidden: torch.Tensor, anchor: int, count: int) -> list[int]:
        """One state, n steps."""
        spec, weights = self.spec, self.weights
        state_weight = 0.5 ** (0.5 / spec.num_heads)
        emb_weight = math.sqrt((1 - state_weight**2) * (spec.inner / 2))
        state, token, found = hidden, anchor, []
        if spec.scales_input:
            state = state / state.pow(2).mean().add(1e-6).sqrt() / math.sqrt(2)
        for i in range(count):
            x = weights[f"proj.{i}.weight"] @ state + weights[f"emb.{i}.weight"][token] * emb_weight / state_weight
            x = x / x.pow(2).mean().add(1e-6).sqrt() * weights[f"ln.{i}.weight"] + weights[f"ln.{i}.bias"]
            state = F.gelu(x)
            token = int((weights[f"head.{i}.weight"] @ state).argmax())
            found.append(token)
        return found
