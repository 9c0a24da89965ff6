"""EagleModel: the EAGLE-1 head (EAGLE-2 uses the same weights). The target's next feature is predicted, then read by its LM head.

Owns: weights and arithmetic of the head. Must not know: requests, drawing, when it runs.
Source: Li et al. 2401.15077; checkpoints as SafeAILab publishes them. Letters: N rows, H width, Vd ids that it scores.

Row j joins the token of position j + 1 with the normed feature of position j: fc, then decoder layers of which the first has no
input norm. The stream behind them is both what the LM head reads and the feature that the next step feeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from specdec.config.methods import FINAL_NORM, Tap
from specdec.errors import ConfigError
from specdec.models.attention import AttentionMetadata, KVPair
from specdec.models.draft_head import HeadReader, HeadSetting, HeadStates, Lender, layer_bytes
from specdec.models.int8_linear import round_layers, rounded
from specdec.models.loader import Checkpoint
from specdec.models.rope import RotaryTable

if TYPE_CHECKING:
    from specdec.models.fused_chain import FusedChain


class EagleModel:
    """The head of one checkpoint.

    Raises:
        ConfigError: its width is not the target's, or a tensor is missing or has another shape.
    """

    chain: FusedChain | None = None

    def __init__(self, hf_config: Any, checkpoint: Checkpoint, setting: HeadSetting) -> None:
        reader = HeadReader(hf_config, checkpoint, setting)
        self.shape = reader.shape
        width = self.shape.hidden_size
        if width != setting.target_width:
            raise ConfigError(
                f"draft hidden size {width} differs from target hidden size {setting.target_width}",
                hint="choose a draft trained for this target",
            )
        self.id_map = setting.draft_ids
        self.tables = reader.tables(draft_vocab_size=hf_config.vocab_size, can_share=True, ids=setting.draft_ids)
        self.fc = reader.linear([f"{reader.base}fc"], [width], 2 * width)
        self.first = reader.first_layer("layers.0", in_size=width)
        self.rest = [reader.layer(index) for index in range(1, hf_config.num_hidden_layers)]
        if setting.is_int8:
            round_layers([self.first, *self.rest])
            self.fc = rounded(self.fc)
            self.tables.round()
        self.rotary = RotaryTable(hf_config, head_dim=self.shape.head_dim, max_positions=setting.max_model_len, device=setting.device)

    @property
    def num_layers(self) -> int:
        """Decoder layers, each with one KV pair."""
        return 1 + len(self.rest)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights of its own."""
        return self.fc.num_bytes + layer_bytes(self.first, self.rest) + self.tables.num_bytes

    def kv_shape(self) -> tuple[int, int]:
        """(num_kv_heads, head_dim) of every layer."""
        return self.shape.num_kv_heads, self.shape.head_dim

    def attach(self, target: Lender) -> None:
        """Borrow the target's embedding and LM head where the checkpoint has none."""
        self.tables.attach(target)

    def combine(self, taps: Mapping[Tap, torch.Tensor]) -> torch.Tensor:
        """The target's normed last state is the feature [N, H]."""
        return taps[FINAL_NORM]

    def forward(
        self, input_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, kv: Sequence[KVPair], meta: AttentionMetadata
    ) -> HeadStates:
        """Predict the feature [N, H] of the position behind each row."""
        cos, sin = self.rotary.cos[positions], self.rotary.sin[positions]  # [N, Dh/2]
        mixed = self.fc(torch.cat((self.tables.embed(input_ids), features), dim=-1))
        delta, residual = self.first(mixed, mixed, cos, sin, kv[0], meta)
        for index, layer in enumerate(self.rest, start=1):
            delta, residual = layer(delta, residual, cos, sin, kv[index], meta)
        stream = delta + residual
        return HeadStates(stream, stream)

    def compute_logits(self, scored: torch.Tensor) -> torch.Tensor:
        """[L, H] -> [L, Vd] float32, of the ids in id_map."""
        return self.tables.logits(scored)
