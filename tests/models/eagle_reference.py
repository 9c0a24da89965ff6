"""EAGLE heads written plainly from the papers: whole sequences, no cache, float32, nothing shared with the served code.

Also writes small random checkpoints of them, in the formats that are published. Letters: T rows, H width, Ht target width, V and Vd
vocabularies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Spec:
    """A head by its sizes and by what its publisher chose. taps: states of the target it reads ([] for its normed last state)."""

    method: str = "eagle3"
    width: int = 32
    target_width: int = 32
    mlp: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    num_layers: int = 1
    vocab: int = 97
    draft_vocab: int = 40
    taps: tuple[int, ...] = (0, 1, 2)
    eps: float = 1e-5
    theta: float = 10000.0
    has_tables: bool = False  # an embedding, and for a whole vocabulary an LM head, in the checkpoint
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    has_bias: bool = False  # of fc for eagle, of q, k, v for eagle3
    has_qk_norm: bool = False
    is_speculators: bool = False
    prefix: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> str:
        """Name of the first layer."""
        return "layers.0" if self.method == "eagle" or self.is_speculators else "midlayer"


def random_weights(spec: Spec, *, seed: int = 0) -> Weights:
    """Weights large enough for varied drafts, under the names of the format, without prefix."""
    width, q, kv = spec.width, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(spec.num_layers):
        name = spec.first if index == 0 else f"layers.{index}"
        wide = 2 * width if index == 0 and spec.method == "eagle3" else width
        projections = {"q_proj": (q, wide), "k_proj": (kv, wide), "v_proj": (kv, wide), "o_proj": (width, q)}
        shapes |= {f"{name}.self_attn.{x}.weight": shape for x, shape in projections.items()}
        if spec.has_bias and spec.method == "eagle3":
            shapes |= {f"{name}.self_attn.{x}.bias": shape[:1] for x, shape in projections.items() if x != "o_proj"}
        if spec.has_qk_norm:
            shapes |= {f"{name}.self_attn.{x}_norm.weight": (spec.head_dim,) for x in "qk"}
        shapes |= {f"{name}.mlp.{x}_proj.weight": (spec.mlp, width) for x in ("gate", "up")}
        shapes |= {f"{name}.mlp.down_proj.weight": (width, spec.mlp), f"{name}.post_attention_layernorm.weight": (width,)}
        if index or spec.method == "eagle3":
            shapes[f"{name}.input_layernorm.weight"] = (width,)
    shapes |= _outer_shapes(spec)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.2 * noise if "norm" in name else noise * (0.2 if len(shape) == 1 else 1 / math.sqrt(shape[1]))
    return weights


def _outer_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    width = spec.width
    tables = {"embed_tokens.weight": (spec.vocab, width)} if spec.has_tables else {}
    if spec.method == "eagle":
        head = {"lm_head.weight": (spec.vocab, width)} if spec.has_tables else {}
        return {"fc.weight": (width, 2 * width), **({"fc.bias": (width,)} if spec.has_bias else {}), **tables, **head}
    joined = len(spec.taps) * spec.target_width
    shapes: dict[str, tuple[int, ...]] = {f"{spec.first}.hidden_norm.weight": (width,), "norm.weight": (width,), **tables}
    if spec.taps:
        shapes["fc.weight"] = (width, joined)
    if spec.has_tables or spec.draft_vocab != spec.vocab:
        shapes["lm_head.weight"] = (spec.draft_vocab, width)
    if spec.norm_before_fc:
        shapes["input_norm.weight"] = (joined,)
    if spec.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (spec.target_width,) for i in range(len(spec.taps))}
    return shapes


def draft_ids(spec: Spec, *, seed: int = 0) -> torch.Tensor:
    """Target id [Vd] of each draft id, ascending."""
    order = torch.randperm(spec.vocab, generator=torch.Generator().manual_seed(seed))
    return order[: spec.draft_vocab].sort().values


def write_head(path: Path, spec: Spec, weights: Weights | None = None, *, seed: int = 0, drop: Sequence[str] = ()) -> Path:
    """Write a checkpoint; `drop` leaves tensors out. Returns its directory."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = dict(random_weights(spec, seed=seed) if weights is None else weights)
    if spec.method == "eagle3" and spec.draft_vocab != spec.vocab:
        ids = draft_ids(spec, seed=seed)
        tensors["d2t"] = ids - torch.arange(spec.draft_vocab)
        tensors["t2d"] = torch.zeros(spec.vocab, dtype=torch.bool).index_fill(0, ids, True)
    named = {name if name == "lm_head.weight" else spec.prefix + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in named.items() if name not in drop}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config_json(spec)), encoding="utf-8")
    return path


def config_json(spec: Spec) -> dict[str, Any]:
    """config.json as the publishers of the format write it."""
    layer = {
        "model_type": "qwen3" if spec.has_qk_norm else "llama",
        "hidden_size": spec.width,
        "intermediate_size": spec.mlp,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "num_hidden_layers": spec.num_layers,
        "max_position_embeddings": 2048,
        "rms_norm_eps": spec.eps,
        "rope_theta": spec.theta,
        "vocab_size": spec.vocab,
        "hidden_act": "silu",
        "attention_bias": spec.has_bias and spec.method == "eagle3",
        "tie_word_embeddings": False,
    }
    if spec.method == "eagle":
        return {"architectures": ["LlamaForCausalLM"], **layer, **spec.extra}
    flags = {name: True for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if getattr(spec, name)}
    keys = {"draft_vocab_size": spec.draft_vocab, "target_hidden_size": spec.target_width, **flags}
    if spec.is_speculators:
        proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal]},
            "transformer_layer_config": layer,
            "norm_before_residual": spec.norm_before_residual,
            "eagle_aux_hidden_state_layer_ids": list(spec.taps),
            **keys,
            **spec.extra,
        }
    eagle = {"eagle_aux_hidden_state_layer_ids": list(spec.taps)} if spec.taps else {"use_aux_hidden_state": False}
    return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **keys, "eagle_config": eagle, **spec.extra}


@dataclass(frozen=True, slots=True)
class Reference:
    """A head over whole sequences. embedding [V, H] and lm_head [V, H] are the target's, for heads that have none."""

    spec: Spec
    weights: Weights
    embedding: torch.Tensor
    lm_head: torch.Tensor
    logit_scale: float = 1.0

    def features(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """The target's states, each [T, Ht] -> [T, H]."""
        spec, weights = self.spec, self.weights
        joined = torch.cat(list(states), dim=-1)
        if spec.norm_before_fc:
            joined = _norm(joined, weights["input_norm.weight"], spec.eps)
        if spec.fc_norm:
            parts = joined.split(spec.target_width, dim=-1)
            joined = torch.cat([_norm(part, weights[f"fc_norm.{i}.weight"], spec.eps) for i, part in enumerate(parts)], dim=-1)
        return joined @ weights["fc.weight"].T if spec.method == "eagle3" and spec.taps else joined

    def rows(self, token_ids: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row j: (token of position j + 1, feature of position j) -> (what the LM head reads, the next feature), each [T, H]."""
        spec, weights = self.spec, self.weights
        token = weights.get("embed_tokens.weight", self.embedding)[token_ids]
        if spec.method == "eagle":
            stream = torch.cat([token, features], dim=-1) @ weights["fc.weight"].T + weights.get("fc.bias", torch.zeros(spec.width))
            stream = stream + self._attention("layers.0", stream)
        else:
            token = _norm(token, weights[f"{spec.first}.input_layernorm.weight"], spec.eps)
            normed = _norm(features, weights[f"{spec.first}.hidden_norm.weight"], spec.eps)
            stream = normed if spec.norm_before_residual else features
            stream = stream + self._attention(spec.first, torch.cat([token, normed], dim=-1))
        stream = stream + self._mlp(spec.first, stream)
        for index in range(1, spec.num_layers):
            name = f"layers.{index}"
            stream = stream + self._attention(name, _norm(stream, weights[f"{name}.input_layernorm.weight"], spec.eps))
            stream = stream + self._mlp(name, stream)
        if spec.method == "eagle":
            return stream, stream
        scored = _norm(stream, weights["norm.weight"], spec.eps)
        return scored, scored if spec.norm_output else stream

    def logits(self, scored: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, Vd]."""
        return scored @ self.weights.get("lm_head.weight", self.lm_head).T * self.logit_scale

    def chain(
        self, successors: Sequence[int], features: torch.Tensor, num_drafts: int, *, to_target: Callable[[int], int]
    ) -> tuple[list[int], torch.Tensor]:
        """Greedy drafts (target ids) behind tokens x_1 .. x_n, given features of positions 0 .. n - 1; their logits [K, Vd] too."""
        ids, fed, drafts, rows = list(successors), features, [], []
        for _ in range(num_drafts):
            scored, following = self.rows(torch.tensor(ids), fed)
            rows.append(self.logits(scored[-1]))
            drafts.append(to_target(int(rows[-1].argmax())))
            ids, fed = [*ids, drafts[-1]], torch.cat([fed, following[-1:]])
        return drafts, torch.stack(rows)

    def _mlp(self, name: str, stream: torch.Tensor) -> torch.Tensor:
        weights = self.weights
        normed = _norm(stream, weights[f"{name}.post_attention_layernorm.weight"], self.spec.eps)
        gate = normed @ weights[f"{name}.mlp.gate_proj.weight"].T
        up = normed @ weights[f"{name}.mlp.up_proj.weight"].T
        return (gate * torch.sigmoid(gate) * up) @ weights[f"{name}.mlp.down_proj.weight"].T

    def _attention(self, name: str, mixed: torch.Tensor) -> torch.Tensor:
        """Causal over all rows, row j at position j; a KV head serves several query heads."""
        spec, num_rows = self.spec, len(mixed)
        query, key, value = (
            self._project(f"{name}.self_attn.{x}_proj", mixed).view(num_rows, heads, spec.head_dim)
            for x, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads))
        )
        if spec.has_qk_norm:
            query = _norm(query, self.weights[f"{name}.self_attn.q_norm.weight"], spec.eps)
            key = _norm(key, self.weights[f"{name}.self_attn.k_norm.weight"], spec.eps)
        query, key = _rope(query, spec.theta), _rope(key, spec.theta)
        hidden = torch.ones(num_rows, num_rows, dtype=torch.bool).triu(1)
        group, out = spec.num_heads // spec.num_kv_heads, []
        for head in range(spec.num_heads):
            scores = query[:, head] @ key[:, head // group].T / math.sqrt(spec.head_dim)
            out.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ value[:, head // group])
        return torch.cat(out, dim=-1) @ self.weights[f"{name}.self_attn.o_proj.weight"].T

    def _project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self.weights.get(f"{name}.bias")
        projected = x @ self.weights[f"{name}.weight"].T
        return projected if bias is None else projected + bias


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rope(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate [T, heads, Dh]: entry i turns with entry i + Dh / 2."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] / theta ** (torch.arange(half) / half)
    turned = torch.polar(torch.ones_like(angle), angle)[:, None] * torch.complex(x[..., :half], x[..., half:])
    return torch.cat([turned.real, turned.imag], dim=-1)
