"""MlpSpeculator: a small recurrence that starts from the target's last hidden state and reads each drafted token.

Owns: weights and arithmetic. Must not know: requests, drawing, when it runs.
Source: Wertheimer et al. 2404.19124. Format: foundation-model-stack (IBM), names perhaps behind `speculator.`.
Letters: N rows, H hidden of the target, E emb_dim, D inner width, n steps, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from specdec.errors import ConfigError
from specdec.models.draft_head import HeadSetting, Lender
from specdec.models.int8_linear import rounded
from specdec.models.linear import Linear
from specdec.models.loader import Checkpoint

EPS = 1e-6


class MlpSpeculator:
    """The recurrence of one checkpoint.

    Raises:
        ConfigError: a tensor is missing or has another shape, or sizes do not fit the target.
    """

    num_layers = 0
    id_map: torch.Tensor | None = None

    def __init__(self, hf_config: Any, checkpoint: Checkpoint, setting: HeadSetting) -> None:
        self.setting, self.checkpoint = setting, checkpoint
        emb = int(getattr(hf_config, "emb_dim", None) or setting.target_width)
        self.inner = int(getattr(hf_config, "inner_dim", None) or emb)
        self.num_heads = int(getattr(hf_config, "n_predict", None) or 3)
        self.ties, self.scales_input = bool(getattr(hf_config, "tie_weights", False)), bool(getattr(hf_config, "scale_input", False))
        if emb != setting.target_width:
            raise ConfigError(
                f"draft emb_dim {emb} differs from target hidden size {setting.target_width}",
                hint="choose a speculator trained for this target",
            )
        self.base = "speculator." if any(name.startswith("speculator.") for name in checkpoint.names()) else ""
        self._tied: dict[tuple[str, str, bool], torch.Tensor] = {}
        vocab, steps = setting.vocab_size, range(self.num_heads)
        self.embeddings = [self._take("emb", i, "weight", (vocab, self.inner)) for i in steps]
        self.projections = [Linear(self._take("proj", i, "weight", (self.inner, self.inner if i else emb))) for i in steps]
        self.heads = [Linear(self._take("head", i, "weight", (vocab, self.inner))) for i in steps]
        if setting.is_int8:
            self.projections, self.heads = _round(self.projections), _round(self.heads)
        self.norms = [(self._take("ln", i, "weight", (self.inner,)), self._take("ln", i, "bias", (self.inner,))) for i in steps]
        state_weight = 0.5 ** (0.5 / self.num_heads)
        self.ratio = math.sqrt((1 - state_weight**2) * self.inner / 2) / state_weight

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights; tied ones count once."""
        tables = {x.data_ptr(): x.numel() * x.element_size() for x in self.embeddings}
        linears = {x.weight.data_ptr(): x.num_bytes for x in (*self.projections, *self.heads)}
        return sum(tables.values()) + sum(linears.values())

    def kv_shape(self) -> tuple[int, int]:
        """No layer has KV."""
        return 0, 0

    def attach(self, target: Lender) -> None:
        """Nothing is borrowed."""

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """The state [N, H] of a chain behind the target's normed hidden states."""
        return _norm(hidden) / math.sqrt(2) if self.scales_input else hidden

    def step(self, index: int, state: torch.Tensor, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft `index` behind the tokens previous [N] (the anchor for 0): (logits [N, V] f32, state [N, D])."""
        mixed = self.projections[index](state) + F.embedding(previous, self.embeddings[index]) * self.ratio
        weight, bias = self.norms[index]
        state = F.gelu(_norm(mixed) * weight + bias)
        return self.heads[index].wide(state), state

    def _take(self, part: str, index: int, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A step's tensor; where weights are tied, that of the first step stands for the others. The first projection is always its own."""
        name, key = f"{self.base}{part}.{index}.{kind}", (part, kind, part == "proj" and index == 0)
        shared = self._tied.get(key) if self.ties else None
        if shared is not None and name not in self.checkpoint:
            return shared
        tensor = self.checkpoint.take(name, shape)  # a tied tensor that is stored again is read and left
        if shared is not None:
            return shared
        self._tied[key] = own = tensor.to(self.setting.device, self.setting.dtype).contiguous()
        return own


def _round(linears: list[Linear]) -> list[Linear]:
    """Take int8 weights; tied ones once."""
    once = {linear.weight.data_ptr(): rounded(linear) for linear in linears}
    return [once[linear.weight.data_ptr()] for linear in linears]


def _norm(x: torch.Tensor) -> torch.Tensor:
    """Root mean square norm of the last dimension, in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
