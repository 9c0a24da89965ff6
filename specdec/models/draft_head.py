"""Parts that heads on the target's hidden states share: token tables, possibly the target's own, and their first layer.

Owns: reading those parts, and the rule of what is borrowed from the target. Must not know: what any head makes of them.
Letters: N rows, L scored rows, H head width, Ht target width, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import functional as F

from specdec.config.methods import Tap
from specdec.errors import ConfigError
from specdec.kernels.layer_ops import layer_ops
from specdec.models.attention import AttentionMetadata, KVPair
from specdec.models.int8_linear import rounded
from specdec.models.linear import Linear
from specdec.models.llama import Attention, DecoderLayer, _LayerReader, layer_has_rope, layer_window
from specdec.models.loader import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specdec.models.fused_chain import FusedChain

_NEEDED_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "rms_norm_eps", "vocab_size")


@dataclass(frozen=True, slots=True)
class HeadStates:
    """What a pass gives: scored [N, H], what the LM head reads, and fed_back [N, H], the next step's features."""

    scored: torch.Tensor
    fed_back: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSetting:
    """Where a head is to run. taps: hidden states of the target it reads; target_width Ht: their size; vocab_size V: the target's.

    draft_ids [Vd] int64, ascending: the target ids that a head without a vocabulary of its own scores, None for all.
    quantization: `int8` rounds the head's products, save those that are the target's.
    """

    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    taps: tuple[Tap, ...]
    target_width: int
    vocab_size: int
    draft_ids: torch.Tensor | None = None
    quantization: str | None = None

    @property
    def is_int8(self) -> bool:
        """Whether the head's products are rounded."""
        return self.quantization == "int8"


class Lender(Protocol):
    """The target, as far as a head borrows from it."""

    embed_tokens: Callable[[torch.Tensor], torch.Tensor]  # [N] -> [N, Ht]
    compute_logits: Callable[[torch.Tensor], torch.Tensor]  # [L, Ht] -> [L, V] f32
    reduced_head: Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]  # ids [Vd] -> ([L, Ht] -> [L, Vd] f32)


class DraftHead(Protocol):
    """A head that drafts step by step. id_map [Vd] int64: target id of each draft id, None where they are equal.

    chain: all steps of a drafting phase as one compiled call, where this machine has one for the head.
    """

    id_map: torch.Tensor | None
    chain: FusedChain | None

    @property
    def num_layers(self) -> int:
        """Decoder layers, each with one KV pair."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights of its own."""
        ...

    def kv_shape(self) -> tuple[int, int]:
        """(num_kv_heads, head_dim) of every layer."""
        ...

    def attach(self, target: Lender) -> None:
        """Borrow from the target what the checkpoint does not hold."""
        ...

    def combine(self, taps: Mapping[Tap, torch.Tensor]) -> torch.Tensor:
        """Hidden states of the target, each [N, Ht] -> features [N, H]."""
        ...

    def forward(
        self, input_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, kv: Sequence[KVPair], meta: AttentionMetadata
    ) -> HeadStates:
        """Row j holds the token of position j + 1 (a target id) and the feature of position j."""
        ...

    def compute_logits(self, scored: torch.Tensor) -> torch.Tensor:
        """[L, H] -> [L, Vd] float32."""
        ...


class TokenTables:
    """Embedding and LM head of a draft head. Each is the checkpoint's own, or the target's where the checkpoint has none.

    ids [Vd] int64: the target ids that are scored, None for all. Their rows of the LM head, row_bytes each, are copied from wherever it is.
    """

    def __init__(
        self,
        embedding: torch.Tensor | None,
        head: Linear | None,
        *,
        logit_scale: float = 1.0,
        ids: torch.Tensor | None = None,
        row_bytes: int = 0,
    ) -> None:
        self.embedding, self.logit_scale, self.ids = embedding, logit_scale, ids
        self._copied_bytes = 0 if ids is None or head is not None else len(ids) * row_bytes
        self.head = head if head is None or ids is None else head.rows(ids)
        self._target: Lender | None = None
        self._scores: Callable[[torch.Tensor], torch.Tensor] | None = None if self.head is None else self.head.wide

    @property
    def num_bytes(self) -> int:
        """Bytes of the checkpoint's own tables, and of what is copied of the target's."""
        embedding = 0 if self.embedding is None else self.embedding.numel() * self.embedding.element_size()
        return embedding + (self._copied_bytes if self.head is None else self.head.num_bytes)

    def attach(self, target: Lender) -> None:
        """Use the target's tables in place of missing ones."""
        self._target = target
        if self.head is None:
            self._scores = target.compute_logits if self.ids is None else target.reduced_head(self.ids)

    def round(self) -> None:
        """Take int8 rows of the checkpoint's own LM head."""
        if self.head is not None:
            self.head = rounded(self.head)
            self._scores = self.head.wide

    @property
    def table(self) -> torch.Tensor | None:
        """The embedding [V, H], the checkpoint's or the target's; None where the target keeps its own to itself."""
        return getattr(self._target, "embedding", None) if self.embedding is None else self.embedding

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, H]."""
        if self.embedding is not None:
            return F.embedding(input_ids, self.embedding)
        assert self._target is not None, "the head was not attached to its target"
        return self._target.embed_tokens(input_ids)

    def logits(self, scored: torch.Tensor) -> torch.Tensor:
        """[L, H] -> [L, Vd] float32."""
        assert self._scores is not None, "the head was not attached to its target"
        logits = self._scores(scored)
        return logits if self.logit_scale == 1.0 else logits * self.logit_scale


class HeadReader(_LayerReader):
    """Reads a head's tensors. base: `model.` where an exporter put that before every name but the LM head's, else empty."""

    def __init__(self, hf_config: Any, checkpoint: Checkpoint, setting: HeadSetting) -> None:
        check_head_config(hf_config, vocab_size=setting.vocab_size)
        self.base = "model." if any(name.startswith("model.") for name in checkpoint.names()) else ""
        super().__init__(hf_config, checkpoint, dtype=setting.dtype, device=setting.device, prefix=f"{self.base}layers.")

    def own(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Take a tensor by its name without `model.`."""
        return self.tensor(self.base + name, shape)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name without `model.`."""
        return self.base + name in self.checkpoint

    def tables(self, *, draft_vocab_size: int, can_share: bool, ids: torch.Tensor | None = None) -> TokenTables:
        """Read embedding and LM head. can_share: whether the target has the same width, so that missing ones can be its own.

        ids: the target ids to score, for a head without a vocabulary of its own.

        Raises:
            ConfigError: one is missing and the target's does not fit.
        """
        width, vocab = self.shape.hidden_size, self.config.vocab_size
        embedding = None
        if self.has("embed_tokens.weight") or not can_share:
            embedding = self.own("embed_tokens.weight", (vocab, width))
        head = None
        if "lm_head.weight" in self.checkpoint or not can_share or draft_vocab_size != vocab:
            head = Linear(self.tensor("lm_head.weight", (draft_vocab_size, width)))
        scale = float(getattr(self.config, "logit_scale", None) or 1.0)
        return TokenTables(embedding, head, logit_scale=scale, ids=ids, row_bytes=width * self.dtype.itemsize)

    def first_layer(self, name: str, *, in_size: int) -> FirstLayer:
        """Read the layer `name` whose query, key and value projections are in_size wide."""
        shape, base = self.shape, f"{self.base}{name}."
        sizes = [shape.q_size, shape.kv_size, shape.kv_size]
        norms = None
        if f"{base}self_attn.q_norm.weight" in self.checkpoint:
            size = (shape.head_dim,)
            norms = (self.tensor(f"{base}self_attn.q_norm.weight", size), self.tensor(f"{base}self_attn.k_norm.weight", size))
        attention = Attention(
            shape,
            qkv=self.linear([f"{base}self_attn.{x}_proj" for x in "qkv"], sizes, in_size),
            out=self.linear([f"{base}self_attn.o_proj"], [shape.hidden_size], shape.q_size),
            norms=norms,
            window=layer_window(self.config, 0),
            has_rope=layer_has_rope(self.config, 0),
        )
        gate_up = self.linear([f"{base}mlp.gate_proj", f"{base}mlp.up_proj"], [shape.intermediate_size] * 2, shape.hidden_size)
        down = self.linear([f"{base}mlp.down_proj"], [shape.hidden_size], shape.intermediate_size)
        post_norm = self.tensor(f"{base}post_attention_layernorm.weight", (shape.hidden_size,))
        return FirstLayer(attention, gate_up=gate_up, down=down, post_norm=post_norm, eps=shape.eps)


class FirstLayer:
    """A decoder layer whose attention input is made by its caller, and may be wider than the stream."""

    input_norm: torch.Tensor | None = None

    def __init__(self, attention: Attention, *, gate_up: Linear, down: Linear, post_norm: torch.Tensor, eps: float) -> None:
        self.attention, self.gate_up, self.down, self.post_norm, self.eps = attention, gate_up, down, post_norm, eps
        self.ops = layer_ops(down.weight.device)

    def __call__(
        self,
        mixed: torch.Tensor,
        residual: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: KVPair,
        meta: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """mixed [N, in_size] beside the stream residual [N, H] -> (delta, residual), whose sum is the stream behind the layer."""
        attended = self.attention(mixed, cos, sin, kv, meta)
        normed, residual = self.ops.add_rms_norm(attended, residual, self.post_norm, self.eps)
        return self.down(self.ops.silu_mul(self.gate_up(normed))), residual


def layer_bytes(first: FirstLayer, rest: Sequence[DecoderLayer]) -> int:
    """Bytes of the projections of a head's layers."""
    layers: list[FirstLayer | DecoderLayer] = [first, *rest]
    return sum(x.num_bytes for layer in layers for x in (layer.attention.qkv, layer.attention.out, layer.gate_up, layer.down))


def check_head_config(hf_config: Any, *, vocab_size: int) -> None:
    """Refuse a head whose config.json lacks a size, has another vocabulary, or asks for arithmetic that heads here do not have.

    Raises:
        ConfigError: names the key.
    """
    for key in _NEEDED_KEYS:
        if not getattr(hf_config, key, None):
            raise ConfigError(f"draft config.json has no {key}, which a draft head needs", hint="export the draft again")
    if hf_config.vocab_size != vocab_size:
        message = f"draft vocabulary {hf_config.vocab_size} differs from target vocabulary {vocab_size}"
        raise ConfigError(message, hint="choose a draft trained for this target")
    activation = getattr(hf_config, "hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"draft config.json: hidden_act is {activation!r}, but heads are served with 'silu' only", hint="choose another")
    if getattr(hf_config, "quantization_config", None):
        raise ConfigError("draft config.json has a quantization_config, but heads are read unquantised", hint="use the unquantised head")
