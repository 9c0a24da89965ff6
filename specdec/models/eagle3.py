"""Eagle3Model: the EAGLE-3 head. Several of the target's states join into one feature; the head has a norm and an LM head of its own.

Owns: weights and arithmetic of the head, and its reduced vocabulary. Must not know: requests, drawing, when it runs.
Sources: Li et al. 2503.01840; EAGLE-3.1 (2605.09992) adds `fc_norm` and `norm_output`. Formats: SafeAILab (the first layer is
`midlayer`) and speculators (`layers.0`). Letters: N rows, H width, Ht target width, n states read, V and Vd vocabularies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from specdec.config.methods import Tap
from specdec.errors import ConfigError
from specdec.kernels.layer_ops import layer_ops
from specdec.logging import get_logger
from specdec.models.attention import AttentionMetadata, KVPair
from specdec.models.draft_head import HeadReader, HeadSetting, HeadStates, Lender, layer_bytes
from specdec.models.draft_ids import read_id_map
from specdec.models.int8_linear import round_layers, rounded
from specdec.models.linear import Linear
from specdec.models.llama import fuse
from specdec.models.loader import Checkpoint
from specdec.models.rope import RotaryTable

if TYPE_CHECKING:
    from specdec.models.fused_chain import FusedChain

logger = get_logger(__name__)


class Eagle3Model:
    """The head of one checkpoint.

    Raises:
        ConfigError: a tensor is missing or has another shape, or the map of its vocabulary is no map.
    """

    def __init__(self, hf_config: Any, checkpoint: Checkpoint, setting: HeadSetting) -> None:
        reader = HeadReader(hf_config, checkpoint, setting)
        self.shape, self.taps, self.ops = reader.shape, setting.taps, layer_ops(setting.device)
        width, vocab = self.shape.hidden_size, int(hf_config.vocab_size)
        draft_vocab = int(getattr(hf_config, "draft_vocab_size", None) or vocab)
        self.id_map = read_id_map(reader, draft_vocab, vocab, device=setting.device)
        self.tables = reader.tables(draft_vocab_size=draft_vocab, can_share=width == setting.target_width)
        self._read_features(reader, setting)
        name = "midlayer" if reader.has("midlayer.self_attn.q_proj.weight") else "layers.0"
        self.first = reader.first_layer(name, in_size=2 * width)
        self.token_norm = reader.own(f"{name}.input_layernorm.weight", (width,))
        self.feature_norm = reader.own(f"{name}.hidden_norm.weight", (width,))
        self.rest = [reader.layer(index) for index in range(1, hf_config.num_hidden_layers)]
        self.final_norm = reader.own("norm.weight", (width,))
        self.norms_residual = _flag(hf_config, "norm_before_residual", default=_family(hf_config) == "eagle3")
        self.norms_output = _flag(hf_config, "norm_output")
        self.rotary = RotaryTable(hf_config, head_dim=self.shape.head_dim, max_positions=setting.max_model_len, device=setting.device)
        is_int8 = setting.is_int8
        self.fused = fuse([self.first, *self.rest], self.shape, self.rotary, final_norm=self.final_norm, is_int8=is_int8)
        if is_int8 and self.fused is None:
            self._round()
        self.chain: FusedChain | None = None  # made once the target has lent its tables
        self._read_mask(reader, setting)

    def _read_features(self, reader: HeadReader, setting: HeadSetting) -> None:
        """Read what joins the target's states: norms on all of them together or on each, and a projection to the head's width."""
        config, wide = reader.config, len(setting.taps) * setting.target_width
        count = getattr(config, "num_aux_hidden_states", None)
        if count is not None and count != len(setting.taps):
            raise ConfigError(
                f"draft config.json: num_aux_hidden_states is {count}, but the layers it reads are {list(setting.taps)}",
                hint="name as many layers in eagle_aux_hidden_state_layer_ids",
            )
        if _flag(config, "norm_before_fc") and _flag(config, "fc_norm"):
            raise ConfigError(
                "draft config.json: norm_before_fc and fc_norm are both true, but a head norms its states together or each alone",
                hint="export the draft again with the one it was trained with",
            )
        self.input_norm = reader.own("input_norm.weight", (wide,)) if _flag(config, "norm_before_fc") else None
        self.fc_norms: list[torch.Tensor] = []
        if _flag(config, "fc_norm"):
            self.fc_norms = [reader.own(f"fc_norm.{i}.weight", (setting.target_width,)) for i in range(len(setting.taps))]
        self.fc: Linear | None = None
        if (getattr(config, "eagle_config", None) or {}).get("use_aux_hidden_state", True):
            self.fc = reader.linear([f"{reader.base}fc"], [self.shape.hidden_size], wide)

    def _round(self) -> None:
        """Take int8 weights where nothing is compiled."""
        round_layers([self.first, *self.rest])
        if self.fc is not None:
            self.fc = rounded(self.fc)
        self.tables.round()

    def _read_mask(self, reader: HeadReader, setting: HeadSetting) -> None:  # noqa: ARG002 (heads that draft in one pass read it)
        """Leave what only a head that drafts in one pass needs."""
        if reader.has("mask_hidden"):
            logger.warning("the draft head holds `mask_hidden` for drafting in one pass; it drafts step by step here and leaves it unused")
            reader.checkpoint.skip(f"{reader.base}mask_hidden")

    @property
    def num_layers(self) -> int:
        """Decoder layers, each with one KV pair."""
        return 1 + len(self.rest)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights of its own."""
        fc = 0 if self.fc is None else self.fc.num_bytes
        return fc + layer_bytes(self.first, self.rest) + self.tables.num_bytes

    def kv_shape(self) -> tuple[int, int]:
        """(num_kv_heads, head_dim) of every layer."""
        return self.shape.num_kv_heads, self.shape.head_dim

    def attach(self, target: Lender) -> None:
        """Borrow the target's embedding, and its LM head where the vocabulary is whole, if the checkpoint has none."""
        self.tables.attach(target)
        if self.fused is not None:
            from specdec.models.fused_chain import fuse_chain  # compiles on import, so only where the CPU can run it

            self.chain = fuse_chain(self)

    def combine(self, taps: Mapping[Tap, torch.Tensor]) -> torch.Tensor:
        """The target's states [N, Ht] in ascending order -> features [N, H]."""
        states = torch.cat([taps[tap] for tap in self.taps], dim=-1)
        if self.input_norm is not None:
            states = self.ops.rms_norm(states, self.input_norm, self.shape.eps)
        if self.fc_norms:
            parts = states.chunk(len(self.fc_norms), dim=-1)
            normed = [self.ops.rms_norm(part, norm, self.shape.eps) for part, norm in zip(parts, self.fc_norms, strict=True)]
            states = torch.cat(normed, dim=-1)
        return states if self.fc is None else self.fc(states)

    def forward(
        self, input_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, kv: Sequence[KVPair], meta: AttentionMetadata
    ) -> HeadStates:
        """The first layer attends over [normed token, normed feature]; the stream begins as the feature."""
        token = self.ops.rms_norm(self.tables.embed(input_ids), self.token_norm, self.shape.eps)
        feature = self.ops.rms_norm(features, self.feature_norm, self.shape.eps)
        residual, mixed = feature if self.norms_residual else features, torch.cat((token, feature), dim=-1)
        if self.fused is not None and self.fused.fits(kv):
            taps = () if self.norms_output else (self.num_layers,)
            normed, tapped = self.fused.run(residual, positions, kv, meta, taps=taps, mixed=mixed)
            return HeadStates(normed, normed if self.norms_output else tapped[self.num_layers])
        cos, sin = self.rotary.cos[positions], self.rotary.sin[positions]  # [N, Dh/2]
        delta, residual = self.first(mixed, residual, cos, sin, kv[0], meta)
        for index, layer in enumerate(self.rest, start=1):
            delta, residual = layer(delta, residual, cos, sin, kv[index], meta)
        normed, stream = self.ops.add_rms_norm(delta, residual, self.final_norm, self.shape.eps)
        return HeadStates(normed, normed if self.norms_output else stream)

    def compute_logits(self, scored: torch.Tensor) -> torch.Tensor:
        """[L, H] -> [L, Vd] float32."""
        return self.tables.logits(scored)


def _family(config: Any) -> str | None:
    return getattr(config, "speculators_model_type", None)


def _flag(config: Any, name: str, *, default: bool = False) -> bool:
    """A flag of the config, or of its eagle_config."""
    value = getattr(config, name, None)
    if value is None:
        value = (getattr(config, "eagle_config", None) or {}).get(name)
    return default if value is None else bool(value)
