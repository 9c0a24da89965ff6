"""LlamaModel: Llama, Mistral, Qwen2, Qwen3, MiMo, SmolLM2/3 and close relatives, one lean forward over paged KV.

Owns: weights and arithmetic of the target. Must not know: requests, sampling, drafting.
Letters: N query rows, H hidden, Hq/Hkv query and KV heads, Dh head dim, I MLP width, V vocabulary.
Oracle: transformers with the same weights (tests/models).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from specdec.config.inference import mtp_depth
from specdec.config.methods import FINAL_NORM, Tap
from specdec.errors import ConfigError
from specdec.kernels.layer_ops import layer_ops
from specdec.models.attention import AttentionMetadata, KVPair
from specdec.models.linear import Linear
from specdec.models.loader import Checkpoint
from specdec.models.mtp_names import is_mtp_tensor
from specdec.models.rope import STATIC_ROPE_TYPES, RotaryTable, rope_parameters

if TYPE_CHECKING:
    from specdec.models.draft_head import FirstLayer
    from specdec.models.fused_stack import FusedStack

ARCHITECTURES = frozenset(
    {"LlamaForCausalLM", "MiMoForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM"}
)
_BIASED_QKV = ("qwen2",)  # families whose code, not config, says so
_NORMED_QK = ("qwen3",)
_READS_ATTENTION_BIAS = ("llama", "qwen3", "smollm3")
_READS_MLP_BIAS = ("llama", "smollm3")
_ALWAYS_FULL = ("llama",)  # its code ignores a stray sliding_window


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Sizes shared by all layers. window: sliding attention, None for full."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    eps: float

    @staticmethod
    def of(hf_config: Any) -> LayerShape:
        """Read the sizes from a transformers config."""
        head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        return LayerShape(
            num_heads=hf_config.num_attention_heads,
            num_kv_heads=getattr(hf_config, "num_key_value_heads", None) or hf_config.num_attention_heads,
            head_dim=head_dim,
            hidden_size=hf_config.hidden_size,
            intermediate_size=hf_config.intermediate_size,
            eps=hf_config.rms_norm_eps,
        )

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key (and of the value) projection."""
        return self.num_kv_heads * self.head_dim


class Attention:
    """Grouped-query attention with fused QKV, optional per-head q/k norms, optional sliding window."""

    def __init__(
        self,
        shape: LayerShape,
        *,
        qkv: Linear,
        out: Linear,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        window: int | None,
        has_rope: bool,
    ) -> None:
        self.shape, self.qkv, self.out, self.norms, self.window, self.has_rope = shape, qkv, out, norms, window, has_rope
        self.ops = layer_ops(out.weight.device)

    def __call__(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv: KVPair, meta: AttentionMetadata) -> torch.Tensor:
        """hidden [N, H] -> [N, H]; writes K and V of the rows first, so that a row sees itself."""
        shape = self.shape
        query, key, value = self.qkv(hidden).split([shape.q_size, shape.kv_size, shape.kv_size], dim=-1)
        query = query.view(-1, shape.num_heads, shape.head_dim)
        key = key.view(-1, shape.num_kv_heads, shape.head_dim)
        if self.norms is not None:
            query = self.ops.rms_norm(query, self.norms[0], shape.eps)
            key = self.ops.rms_norm(key, self.norms[1], shape.eps)
        if self.has_rope:
            query, key = self.ops.rotate(query, cos, sin), self.ops.rotate(key, cos, sin)
        self.ops.store_kv(key, value.view(-1, shape.num_kv_heads, shape.head_dim), *kv, meta.slot_mapping)
        attended = attend(self.ops, query, kv, meta, scale=shape.head_dim**-0.5, window=self.window)
        return self.out(attended.view(-1, shape.q_size))


def attend(ops: Any, query: torch.Tensor, kv: KVPair, meta: AttentionMetadata, *, scale: float, window: int | None) -> torch.Tensor:
    """Attention of query [N, Hq, Dh] over the paged cache as the metadata says."""
    attended: torch.Tensor = (meta.paged_attention or ops.paged_attention)(
        query,
        *kv,
        query_lens=meta.query_lens_cpu,
        seq_lens=meta.seq_lens_cpu,
        block_table=meta.block_table,
        scale=scale,
        is_causal=meta.is_causal,
        tree_mask=meta.tree_mask,
        window=window,
        device_lens=meta.device_lens,
    )
    return attended


class DecoderLayer:
    """Pre-norm attention and gated MLP; the residual stream travels beside the last sub-layer's output."""

    def __init__(
        self, shape: LayerShape, *, attention: Attention, gate_up: Linear, down: Linear, norms: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        self.shape, self.attention, self.gate_up, self.down = shape, attention, gate_up, down
        self.input_norm, self.post_norm = norms
        self.ops = layer_ops(down.weight.device)

    def __call__(
        self, delta: torch.Tensor | None, residual: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv: KVPair, meta: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(delta, residual) [N, H] -> the same; the stream is their sum. delta None: the stream is residual alone."""
        if delta is None:
            normed = self.ops.rms_norm(residual, self.input_norm, self.shape.eps)
        else:
            normed, residual = self.ops.add_rms_norm(delta, residual, self.input_norm, self.shape.eps)
        attended = self.attention(normed, cos, sin, kv, meta)
        normed, residual = self.ops.add_rms_norm(attended, residual, self.post_norm, self.shape.eps)
        return self.down(self.ops.silu_mul(self.gate_up(normed))), residual


class LlamaModel:
    """The target: embedding, decoder layers, final norm, head."""

    is_capturable = True

    def __init__(self, hf_config: Any, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        self.config = hf_config
        self.shape = LayerShape.of(hf_config)
        self.dtype, self.device = dtype, device
        self.ops = layer_ops(device)
        reader = _LayerReader(hf_config, checkpoint, dtype=dtype, device=device)
        hidden, vocab = self.shape.hidden_size, hf_config.vocab_size
        self.embedding = reader.tensor("model.embed_tokens.weight", (vocab, hidden))
        if mtp_depth(hf_config.to_dict()) is not None:  # its modules are a drafter's to read
            checkpoint.skip(*(name for name in checkpoint.names() if is_mtp_tensor(name, hf_config.num_hidden_layers)))
        self.layers: list[DecoderLayer] = [reader.layer(index) for index in range(hf_config.num_hidden_layers)]
        self.norm_weight = reader.tensor("model.norm.weight", (hidden,))
        if hf_config.tie_word_embeddings:
            checkpoint.skip("lm_head.weight")
            self.head = Linear(self.embedding)
        else:
            self.head = Linear(reader.tensor("lm_head.weight", (vocab, hidden)))
        self.rotary = RotaryTable(hf_config, head_dim=self.shape.head_dim, max_positions=max_model_len, device=device)
        self.fused = fuse(self.layers, self.shape, self.rotary, final_norm=self.norm_weight)

    @property
    def num_layers(self) -> int:
        """Decoder layers, each with one KV pair."""
        return len(self.layers)

    def kv_shape(self) -> tuple[int, int]:
        """(num_kv_heads, head_dim) of every layer's cache."""
        return self.shape.num_kv_heads, self.shape.head_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        linears = [x for layer in self.layers for x in (layer.attention.qkv, layer.attention.out, layer.gate_up, layer.down)]
        total = sum(linear.num_bytes for linear in linears) + self.head.num_bytes
        return total if self.config.tie_word_embeddings else total + self.embedding.numel() * self.embedding.element_size()

    def embed_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, H]."""
        return F.embedding(input_ids, self.embedding)

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The norm before the head, [N, H] -> [N, H]."""
        normed: torch.Tensor = self.ops.rms_norm(hidden, self.norm_weight, self.shape.eps)
        return normed

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed hidden [L, H] -> logits [L, V] float32."""
        return self.head.wide(hidden)

    def reduced_head(self, ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """compute_logits of the ids [n] alone, over a copy of their rows: [L, H] -> [L, n] float32."""
        return self.head.rows(ids).wide

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv: Sequence[KVPair], meta: AttentionMetadata, *, taps: Collection[Tap] = ()
    ) -> tuple[torch.Tensor, Mapping[Tap, torch.Tensor]]:
        """Return the normed hidden states [N, H] and the tapped ones: m is the residual stream after m layers."""
        if self.fused is not None and self.fused.fits(kv):
            hidden, tapped = self.fused.run(self.embed_tokens(input_ids), positions, kv, meta, taps=taps)
            return hidden, tapped | {FINAL_NORM: hidden}
        return self.forward_eager(input_ids, positions, kv, meta, taps=taps)

    def forward_eager(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv: Sequence[KVPair], meta: AttentionMetadata, *, taps: Collection[Tap] = ()
    ) -> tuple[torch.Tensor, Mapping[Tap, torch.Tensor]]:
        """The same layer by layer in torch: what other devices run, and the oracle of the fused call."""
        cos, sin = self.rotary.cos[positions], self.rotary.sin[positions]  # [N, Dh/2]
        tapped: dict[Tap, torch.Tensor] = {}
        residual = self.embed_tokens(input_ids)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            if index in taps:
                tapped[index] = residual if delta is None else delta + residual
            delta, residual = layer(delta, residual, cos, sin, kv[index], meta)
        stream = residual if delta is None else delta + residual
        if self.num_layers in taps:
            tapped[self.num_layers] = stream
        hidden = self.final_norm(stream)
        if FINAL_NORM in taps:
            tapped[FINAL_NORM] = hidden
        return hidden, tapped


def fuse(
    layers: Sequence[DecoderLayer | FirstLayer],
    shape: LayerShape,
    rotary: RotaryTable,
    *,
    final_norm: torch.Tensor | None,
    is_int8: bool = False,
) -> FusedStack | None:
    """Return the compiled stack where this CPU can run it, else None. is_int8: with weights rounded to int8."""
    if not layers or layers[0].down.weight.device.type != "cpu" or layers[0].down.weight.dtype is not torch.bfloat16:
        return None
    from specdec.kernels.cpu.team import has_amx, has_amx_int8

    if not has_amx() or (is_int8 and not has_amx_int8()):
        return None
    from specdec.models.fused_stack import FusedStack, can_fuse, can_fuse_int8  # compiles on import, so only where the CPU can run it

    if not can_fuse(layers, shape) or (is_int8 and not can_fuse_int8(layers)):
        return None
    return FusedStack(layers, shape, rotary, final_norm=final_norm, is_int8=is_int8)


class _LayerReader:
    """Reads and fuses the weights of one architecture; family differences are facts of the config, looked up here."""

    def __init__(
        self, hf_config: Any, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, prefix: str = "model.layers."
    ) -> None:
        self.config, self.checkpoint, self.dtype, self.device, self.prefix = hf_config, checkpoint, dtype, device, prefix
        self.shape = LayerShape.of(hf_config)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.checkpoint.take(name, shape).to(self.device, self.dtype).contiguous()

    def linear(self, names: list[str], out_sizes: list[int], in_size: int, *, needs_bias: bool = False) -> Linear:
        """Fuse the projections. needs_bias: the config asks for biases, so their absence is a fault of the checkpoint."""
        weight = torch.cat([self.tensor(f"{name}.weight", (size, in_size)) for name, size in zip(names, out_sizes, strict=True)])
        has_bias = [f"{name}.bias" in self.checkpoint for name in names]
        if not (needs_bias or any(has_bias)):
            return Linear(weight)
        return Linear(weight, torch.cat([self.tensor(f"{name}.bias", (size,)) for name, size in zip(names, out_sizes, strict=True)]))

    def layer(self, index: int) -> DecoderLayer:
        shape, base = self.shape, f"{self.prefix}{index}."
        biased = self.config.model_type in _READS_MLP_BIAS and bool(self.config.mlp_bias)
        gate_up = self.linear(
            [f"{base}mlp.gate_proj", f"{base}mlp.up_proj"], [shape.intermediate_size] * 2, shape.hidden_size, needs_bias=biased
        )
        down = self.linear([f"{base}mlp.down_proj"], [shape.hidden_size], shape.intermediate_size, needs_bias=biased)
        norms = tuple(self.tensor(f"{base}{name}.weight", (shape.hidden_size,)) for name in ("input_layernorm", "post_attention_layernorm"))
        return DecoderLayer(shape, attention=self.attention(index), gate_up=gate_up, down=down, norms=(norms[0], norms[1]))

    def attention(self, index: int) -> Attention:
        shape, base = self.shape, f"{self.prefix}{index}.self_attn."
        biased = self.config.model_type in _READS_ATTENTION_BIAS and bool(self.config.attention_bias)
        sizes = [shape.q_size, shape.kv_size, shape.kv_size]
        qkv = self.linear(
            [f"{base}{x}_proj" for x in "qkv"], sizes, shape.hidden_size, needs_bias=biased or self.config.model_type in _BIASED_QKV
        )
        out = self.linear([f"{base}o_proj"], [shape.hidden_size], shape.q_size, needs_bias=biased)
        norms = None
        if f"{base}q_norm.weight" in self.checkpoint or self.config.model_type in _NORMED_QK:
            norms = (self.tensor(f"{base}q_norm.weight", (shape.head_dim,)), self.tensor(f"{base}k_norm.weight", (shape.head_dim,)))
        return Attention(
            shape, qkv=qkv, out=out, norms=norms, window=layer_window(self.config, index), has_rope=layer_has_rope(self.config, index)
        )


def layer_window(hf_config: Any, index: int) -> int | None:
    """Sliding window of a layer, or None for full attention: also past the last layer that the config lists, where MTP modules lie."""
    window = getattr(hf_config, "sliding_window", None)
    if hf_config.model_type in _ALWAYS_FULL or not window or not getattr(hf_config, "use_sliding_window", True):
        return None
    kinds = getattr(hf_config, "layer_types", None)
    if kinds is not None:
        return int(window) if index < len(kinds) and kinds[index] == "sliding_attention" else None
    return int(window)


def layer_has_rope(hf_config: Any, index: int) -> bool:
    """False for the layers without position embedding of SmolLM3; those past the last that the config lists have one."""
    flags = getattr(hf_config, "no_rope_layers", None) or ()
    return bool(flags[index]) if index < len(flags) else True


def is_lean(hf_config: Any) -> bool:
    """True when this file can serve the checkpoint; otherwise models/hf.py does."""
    architectures = getattr(hf_config, "architectures", None) or []
    return (
        bool(set(architectures) & ARCHITECTURES) and rope_parameters(hf_config)["rope_type"] in STATIC_ROPE_TYPES and _is_plain(hf_config)
    )


def _is_plain(hf_config: Any) -> bool:
    return getattr(hf_config, "hidden_act", "silu") == "silu" and not getattr(hf_config, "quantization_config", None)


def require_text_model(hf_config: Any) -> None:
    """Refuse a config that is no causal language model."""
    if not getattr(hf_config, "vocab_size", None):
        raise ConfigError(f"model type {getattr(hf_config, 'model_type', '?')!r} has no vocab_size", hint="serve a causal language model")
