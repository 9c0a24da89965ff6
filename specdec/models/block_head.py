"""BlockHead: a drafter that fills a whole block in one pass and reads the target's states as keys and values (DFlash, DSpark).

Owns: weights and arithmetic of the block, and DSpark's estimate of what is kept. Must not know: requests, drawing, when it runs.
Sources: DFlash (2602.06036), DSpark (2607.05147). Letters: N rows, P context rows, H width, Ht target width, n states read,
V and Vd vocabularies, r rank of the correction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specdec.config.methods import Tap
from specdec.errors import ConfigError
from specdec.kernels.layer_ops import layer_ops
from specdec.models.attention import AttentionMetadata, KVPair
from specdec.models.draft_head import HeadReader, HeadSetting, Lender
from specdec.models.draft_ids import read_id_map
from specdec.models.int8_linear import round_layers, rounded
from specdec.models.linear import Linear
from specdec.models.llama import Attention, DecoderLayer, fuse
from specdec.models.loader import Checkpoint
from specdec.models.markov_head import MarkovHead
from specdec.models.rope import RotaryTable

_OTHER_VARIANTS = ("DFlash2", "XPress", "LiLiCorr", "Domino", "Omni", "Gemma4", "Muse", "K3")


class BlockHead:
    """The block of one checkpoint. mask_token_id: fed at every place of the block behind its first.

    Raises:
        ConfigError: a tensor is missing or has another shape, or the checkpoint is of a variant that is not served.
    """

    def __init__(self, hf_config: Any, checkpoint: Checkpoint, setting: HeadSetting) -> None:
        _refuse_variants(hf_config)
        reader = HeadReader(hf_config, checkpoint, setting)
        self.shape, self.taps, self.ops = reader.shape, setting.taps, layer_ops(setting.device)
        width, vocab = self.shape.hidden_size, int(hf_config.vocab_size)
        draft_vocab = int(getattr(hf_config, "draft_vocab_size", None) or vocab)
        self.mask_token_id = _mask_token(hf_config, vocab)
        self.id_map = read_id_map(reader, draft_vocab, vocab, device=setting.device)
        self.tables = reader.tables(draft_vocab_size=draft_vocab, can_share=width == setting.target_width)
        self.fc = reader.linear([f"{reader.base}fc"], [width], len(setting.taps) * setting.target_width)
        self.context_norm = reader.own("hidden_norm.weight", (width,))
        self.layers: list[DecoderLayer] = [reader.layer(index) for index in range(hf_config.num_hidden_layers)]
        self.final_norm = reader.own("norm.weight", (width,))
        self.rotary = RotaryTable(hf_config, head_dim=self.shape.head_dim, max_positions=setting.max_model_len, device=setting.device)
        self.context_kv = [_key_value_part(layer.attention) for layer in self.layers]
        self.markov = MarkovHead.read(reader, hf_config, draft_vocab=draft_vocab)
        self.confidence = ConfidenceHead.read(reader, hf_config, markov=self.markov)
        self.fused = fuse(self.layers, self.shape, self.rotary, final_norm=self.final_norm, is_int8=setting.is_int8)
        if setting.is_int8 and self.fused is None:
            self._round()

    def _round(self) -> None:
        """Take int8 weights where nothing is compiled."""
        round_layers(self.layers)
        self.fc = rounded(self.fc)
        self.context_kv = [rounded(projection) for projection in self.context_kv]
        self.tables.round()

    @property
    def num_layers(self) -> int:
        """Decoder layers, each with one KV pair."""
        return len(self.layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights of its own."""
        linears = [x for layer in self.layers for x in (layer.attention.qkv, layer.attention.out, layer.gate_up, layer.down)]
        markov = 0 if self.markov is None else self.markov.num_bytes
        return self.fc.num_bytes + sum(linear.num_bytes for linear in linears) + self.tables.num_bytes + markov

    def kv_shape(self) -> tuple[int, int]:
        """(num_kv_heads, head_dim) of every layer."""
        return self.shape.num_kv_heads, self.shape.head_dim

    def attach(self, target: Lender) -> None:
        """Borrow the target's tables where the checkpoint has none."""
        self.tables.attach(target)

    def write_context(
        self, taps: Mapping[Tap, torch.Tensor], positions: torch.Tensor, kv: Sequence[KVPair], slot_mapping: torch.Tensor
    ) -> None:
        """Project the target's states [P, Ht] at committed positions [P] to every layer's K and V; nothing attends here."""
        states = self.fc(torch.cat([taps[tap] for tap in self.taps], dim=-1))
        context = self.ops.rms_norm(states, self.context_norm, self.shape.eps)
        cos, sin = self.rotary.cos[positions], self.rotary.sin[positions]  # [P, Dh/2]
        heads, size = self.kv_shape()
        for layer, projection, pair in zip(self.layers, self.context_kv, kv, strict=True):
            key, value = (part.view(-1, heads, size) for part in projection(context).chunk(2, dim=-1))
            if layer.attention.norms is not None:
                key = self.ops.rms_norm(key, layer.attention.norms[1], self.shape.eps)
            if layer.attention.has_rope:
                key = self.ops.rotate(key, cos, sin)
            self.ops.store_kv(key, value, *pair, slot_mapping)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, kv: Sequence[KVPair], meta: AttentionMetadata) -> torch.Tensor:
        """Run the blocks' rows [N]; each sees its context and its whole block (meta.is_causal is false). Returns normed [N, H]."""
        stream = self.tables.embed(input_ids)
        if self.fused is not None and self.fused.fits(kv):
            return self.fused.run(stream, positions, kv, meta)[0]
        cos, sin = self.rotary.cos[positions], self.rotary.sin[positions]
        delta: torch.Tensor | None = None
        for layer, pair in zip(self.layers, kv, strict=True):
            delta, stream = layer(delta, stream, cos, sin, pair, meta)
        assert delta is not None, "a block has layers"
        normed: torch.Tensor = self.ops.rms_norm(stream + delta, self.final_norm, self.shape.eps)
        return normed

    def compute_logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[L, H] -> [L, Vd] float32, before any correction."""
        return self.tables.logits(normed)


class ConfidenceHead:
    """How likely a draft is kept, given that those before it are: sigmoid(w [h; W1[previous]] + b). weight [H] or [H + r] f32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    @classmethod
    def read(cls, reader: HeadReader, hf_config: Any, *, markov: MarkovHead | None) -> ConfidenceHead | None:
        """Read it where the checkpoint holds one; a config may promise one that was never trained."""
        if not reader.has("confidence_head.proj.weight"):
            return None
        width = reader.shape.hidden_size
        if getattr(hf_config, "confidence_head_with_markov", False) and markov is not None:
            width += markov.first.shape[1]
        weight = reader.own("confidence_head.proj.weight", (1, width)).float()[0]
        bias = reader.own("confidence_head.proj.bias", (1,)).float() if reader.has("confidence_head.proj.bias") else None
        return cls(weight, bias)

    def __call__(self, normed: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        """normed [N, H], embedded [N, r] -> [N] f32. It knows the token before a draft, never the draft: verification stays exact."""
        width = normed.shape[-1]
        score = normed.float() @ self.weight[:width]
        if len(self.weight) > width:
            assert embedded is not None, "this confidence head reads the correction's embedding"
            score = score + embedded.float() @ self.weight[width:]
        return torch.sigmoid(score if self.bias is None else score + self.bias)


def _key_value_part(attention: Attention) -> Linear:
    """The K and V rows of a fused projection, for context rows, which have no query."""
    return attention.qkv.rows(slice(attention.shape.q_size, None))


def _mask_token(hf_config: Any, vocab: int) -> int:
    keys = [getattr(hf_config, key, None) for key in ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")]
    keys.insert(0, (getattr(hf_config, "dflash_config", None) or {}).get("mask_token_id"))
    found = next((int(key) for key in keys if key is not None), None)
    if found is None:
        raise ConfigError("draft config.json names no mask_token_id, which a block drafter is fed", hint="export the draft again")
    if not 0 <= found < vocab:
        raise ConfigError(f"draft config.json: mask_token_id is {found}, but the vocabulary has {vocab} ids", hint="export the draft again")
    return found


def _refuse_variants(hf_config: Any) -> None:
    names = list(getattr(hf_config, "architectures", None) or [])
    for name in names:
        for variant in _OTHER_VARIANTS:
            if variant.lower() in name.lower():
                hint = "plain DFlash and DSpark checkpoints of Llama and Qwen3 layers are served"
                raise ConfigError(f"draft config.json: architecture {name} ({variant}) is not built", hint=hint)
