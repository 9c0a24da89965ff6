"""DFlash and DSpark heads written plainly from the papers: a whole text at once, float32, nothing shared with the served code.

Also writes small random checkpoints of them. Letters: T tokens of text, W rows of the block, H width, V and Vd vocabularies, r rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """A head by its sizes. taps: states of the target it reads, counted in layers already applied."""

    method: str = "dspark"
    width: int = 32
    mlp: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    num_layers: int = 2
    vocab: int = 97
    draft_vocab: int = 40
    rank: int = 8
    markov: str = "vanilla"
    drafts: int = 7
    mask_token_id: int = 5
    taps: tuple[int, ...] = (1, 2)
    has_qk_norm: bool = True
    from_anchor: bool = True  # of DSpark: the first row drafts already
    has_confidence: bool = True
    is_speculators: bool = False
    eps: float = 1e-5
    theta: float = 10000.0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def has_bonus_row(self) -> bool:
        """Whether the anchor's row drafts nothing."""
        return self.method == "dflash" or not self.from_anchor


def random_weights(spec: BlockSpec, *, seed: int = 0) -> Weights:
    """Weights large enough for varied drafts, under the names of the format."""
    width, q, kv = spec.width, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(spec.taps) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for name in (f"layers.{index}" for index in range(spec.num_layers)):
        shapes |= {f"{name}.self_attn.{x}_proj.weight": (size, width) for x, size in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {f"{name}.self_attn.o_proj.weight": (width, q), f"{name}.mlp.down_proj.weight": (width, spec.mlp)}
        shapes |= {f"{name}.mlp.{x}_proj.weight": (spec.mlp, width) for x in ("gate", "up")}
        shapes |= {f"{name}.{x}_layernorm.weight": (width,) for x in ("input", "post_attention")}
        if spec.has_qk_norm:
            shapes |= {f"{name}.self_attn.{x}_norm.weight": (spec.head_dim,) for x in "qk"}
    if spec.draft_vocab != spec.vocab:
        shapes["lm_head.weight"] = (spec.draft_vocab, width)
    if spec.method == "dspark":
        shapes |= {"markov_head.markov_w1.weight": (spec.vocab, spec.rank), "markov_head.markov_w2.weight": (spec.draft_vocab, spec.rank)}
        if spec.markov == "gated":
            shapes |= {"markov_head.gate_proj.weight": (spec.rank, width + spec.rank), "markov_head.gate_proj.bias": (spec.rank,)}
        if spec.markov == "rnn":
            shapes |= {
                "markov_head.joint_proj.weight": (3 * spec.rank, width + 2 * spec.rank),
                "markov_head.joint_proj.bias": (3 * spec.rank,),
            }
        if spec.has_confidence:
            shapes |= {"confidence_head.proj.weight": (1, width + spec.rank), "confidence_head.proj.bias": (1,)}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.2 * noise if "norm" in name else noise * (0.2 if len(shape) == 1 else 1.5 / math.sqrt(shape[1]))
    return weights


def write_block_head(path: Path, spec: BlockSpec, *, seed: int = 0, drop: Sequence[str] = (), more: Weights | None = None) -> Path:
    """Write a checkpoint; `drop` leaves tensors out, `more` adds some. Returns its directory."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = random_weights(spec, seed=seed) | (more or {})
    if spec.draft_vocab != spec.vocab:
        order = torch.randperm(spec.vocab, generator=torch.Generator().manual_seed(seed))
        tensors["d2t"] = order[: spec.draft_vocab].sort().values - torch.arange(spec.draft_vocab)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items() if name not in drop}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config_json(spec)), encoding="utf-8")
    return path


def config_json(spec: BlockSpec) -> dict[str, Any]:
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
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    keys: dict[str, Any] = {"draft_vocab_size": spec.draft_vocab, "mask_token_id": spec.mask_token_id}
    if spec.method == "dspark":
        keys |= {"markov_rank": spec.rank, "markov_head_type": spec.markov, "sample_from_anchor": spec.from_anchor}
        keys |= {"enable_confidence_head": spec.has_confidence, "confidence_head_with_markov": True}
    keys["block_size"] = spec.drafts + (spec.method == "dflash")
    if spec.is_speculators:
        proposal = {"proposal_type": "greedy", "speculative_tokens": spec.drafts}
        algorithm = {"algorithm": spec.method, "default_proposal_method": "greedy", "proposal_methods": [proposal]}
        names = {"speculators_model_type": spec.method, "speculators_config": algorithm, "aux_hidden_state_layer_ids": list(spec.taps)}
        return {"architectures": ["DSparkSpeculator"], **names, "transformer_layer_config": layer, **keys, **spec.extra}
    ids = [tap - 1 for tap in spec.taps]  # these formats name a layer by its number and mean its output
    if spec.method == "dflash":
        mask = keys.pop("mask_token_id")
        return {
            "architectures": ["DFlashDraftModel"],
            **layer,
            **keys,
            "dflash_config": {"mask_token_id": mask, "target_layer_ids": ids},
            **spec.extra,
        }
    return {"architectures": ["Qwen3DSparkModel"], **layer, **keys, "target_layer_ids": ids, **spec.extra}


class PlainBlock:
    """What the reference drafts behind a text. Both checkpoints are read with nothing of the served code."""

    def __init__(self, target: Path, head: Path, spec: BlockSpec) -> None:
        self.spec = spec
        self.model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.weights: Weights = load_file(head / "model.safetensors")
        self.offsets = self.weights.get("d2t")

    @torch.no_grad()
    def drafts(self, text: Sequence[int], count: int) -> list[int]:
        """Greedy drafts behind the text, whose last token is the anchor."""
        return self.walk(text, self.block(text, count), count)[0]

    @torch.no_grad()
    def confidences(self, text: Sequence[int], count: int) -> list[float]:
        """The confidence of each of those drafts."""
        return self.walk(text, self.block(text, count), count)[1]

    def walk(self, text: Sequence[int], rows: torch.Tensor, count: int) -> tuple[list[int], list[float]]:
        """Choose slot by slot; each choice corrects the next one's logits."""
        weights, drafts, trust, previous = self.weights, [], [], text[-1]
        head = weights.get("lm_head.weight", self.model.lm_head.weight)
        state = torch.zeros(self.spec.rank)
        for row in rows[int(self.spec.has_bonus_row) :][:count]:
            logits = head @ row
            if self.spec.method == "dspark":
                embedded = weights["markov_head.markov_w1.weight"][previous]
                corrected, state = self.correct(embedded, row, state)
                logits = logits + weights["markov_head.markov_w2.weight"] @ corrected
                if self.spec.has_confidence:
                    score = weights["confidence_head.proj.weight"][0] @ torch.cat([row, embedded]) + weights["confidence_head.proj.bias"][0]
                    trust.append(float(torch.sigmoid(score)))
            best = int(logits.argmax())
            previous = best if self.offsets is None else best + int(self.offsets[best])
            drafts.append(previous)
        return drafts, trust

    def correct(self, embedded: torch.Tensor, row: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What W2 is applied to, and what the next slot gets."""
        weights, rank = self.weights, self.spec.rank
        if self.spec.markov == "vanilla":
            return embedded, state
        if self.spec.markov == "gated":
            gate = weights["markov_head.gate_proj.weight"] @ torch.cat([row, embedded]) + weights["markov_head.gate_proj.bias"]
            return embedded * torch.sigmoid(gate), state
        joint = weights["markov_head.joint_proj.weight"] @ torch.cat([state, embedded, row]) + weights["markov_head.joint_proj.bias"]
        keep = torch.sigmoid(joint[:rank])
        return torch.tanh(joint[2 * rank :]), state * keep + torch.tanh(joint[rank : 2 * rank]) * (1 - keep)

    def block(self, text: Sequence[int], count: int) -> torch.Tensor:
        """Normed states [W, H] of the block behind text[:-1], whose states are its context."""
        spec, weights = self.spec, self.weights
        context = self.states(text[:-1]) @ weights["fc.weight"].T
        context = self.norm(context, "hidden_norm.weight")
        ids = [text[-1], *[spec.mask_token_id] * (count - 1 + spec.has_bonus_row)]
        stream = self.model.model.embed_tokens.weight[ids]
        places = torch.arange(len(text) - 1 + len(ids))
        for name in (f"layers.{index}" for index in range(spec.num_layers)):
            normed = self.norm(stream, f"{name}.input_layernorm.weight")
            stream = stream + self.attention(name, context, normed, places)
            normed = self.norm(stream, f"{name}.post_attention_layernorm.weight")
            gate, up = (normed @ weights[f"{name}.mlp.{x}_proj.weight"].T for x in ("gate", "up"))
            stream = stream + (gate * torch.sigmoid(gate) * up) @ weights[f"{name}.mlp.down_proj.weight"].T
        return self.norm(stream, "norm.weight")

    def states(self, text: Sequence[int]) -> torch.Tensor:
        """The target's states [T, n * H] before each tapped layer; the library's own last entry is behind the final norm."""
        streams: list[torch.Tensor] = []
        parts = [*self.model.model.layers, self.model.model.norm]
        hooks = [part.register_forward_pre_hook(lambda _, args: streams.append(args[0][0])) for part in parts]
        self.model.model(input_ids=torch.tensor([list(text)]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return torch.cat([streams[tap] for tap in self.spec.taps], dim=-1)

    def attention(self, name: str, context: torch.Tensor, block: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Block rows see all context rows and all block rows."""
        spec, weights, wide = self.spec, self.weights, torch.cat([context, block])
        query = (block @ weights[f"{name}.self_attn.q_proj.weight"].T).view(len(block), spec.num_heads, spec.head_dim)
        key, value = (
            (wide @ weights[f"{name}.self_attn.{x}_proj.weight"].T).view(len(wide), spec.num_kv_heads, spec.head_dim) for x in "kv"
        )
        if spec.has_qk_norm:
            query, key = self.norm(query, f"{name}.self_attn.q_norm.weight"), self.norm(key, f"{name}.self_attn.k_norm.weight")
        query, key = rope(query, places[len(context) :], spec.theta), rope(key, places, spec.theta)
        group, out = spec.num_heads // spec.num_kv_heads, []
        for head in range(spec.num_heads):
            weight = (query[:, head] @ key[:, head // group].T / math.sqrt(spec.head_dim)).softmax(-1)
            out.append(weight @ value[:, head // group])
        return torch.cat(out, dim=-1) @ weights[f"{name}.self_attn.o_proj.weight"].T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMS norm by the weight of that name."""
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.spec.eps) * self.weights[name]


def rope(x: torch.Tensor, places: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate [T, heads, Dh] at positions [T]: entry i turns with entry i + Dh / 2."""
    half = x.shape[-1] // 2
    angle = places[:, None] / theta ** (torch.arange(half) / half)
    turned = torch.polar(torch.ones_like(angle), angle)[:, None] * torch.complex(x[..., :half], x[..., half:])
    return torch.cat([turned.real, turned.imag], dim=-1)
