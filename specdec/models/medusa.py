"""MedusaHeads: each head reads the target's last hidden state and predicts one place further ahead, knowing of no other draft.

Owns: weights and arithmetic of the heads. Must not know: requests, drawing, when they run.
Source: Cai et al. 2401.10774. Formats: FasterDecoding (`{h}.{l}.linear`, `{h}.{last}`, perhaps behind `medusa_head.`) and vLLM's
(`blocks.{h}.layers.{l}`, `lm_heads.{h}`, `token_map`). Letters: N rows, H hidden, V and Vd vocabularies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from specdec.errors import ConfigError
from specdec.models.draft_head import HeadSetting, Lender
from specdec.models.int8_linear import rounded
from specdec.models.linear import Linear
from specdec.models.loader import Checkpoint


class MedusaHeads:
    """All heads of one checkpoint.

    Raises:
        ConfigError: a tensor is missing or has another shape.
    """

    num_layers = 0

    def __init__(self, hf_config: Any, checkpoint: Checkpoint, setting: HeadSetting) -> None:
        self.setting, self.checkpoint = setting, checkpoint
        self.width = setting.target_width
        self.num_heads = int(getattr(hf_config, "num_heads", None) or getattr(hf_config, "medusa_num_heads", None) or 0)
        blocks = int(_first(hf_config, "num_hidden_layers", "medusa_num_layers", default=1))
        if not self.num_heads:
            raise ConfigError("draft config.json names no medusa_num_heads", hint="export the heads again with their config")
        self.is_public = "lm_heads.0.weight" in checkpoint or "blocks.0.layers.0.weight" in checkpoint
        self.prefix = "medusa_head." if any(name.startswith("medusa_head.") for name in checkpoint.names()) else ""
        self.num_heads = max(self.num_heads, self._stored_heads())
        self.id_map = self._token_map()
        vocab = setting.vocab_size if self.id_map is None else len(self.id_map)
        self.blocks = [[self._block(head, layer) for layer in range(blocks)] for head in range(self.num_heads)]
        self.outputs: list[Linear | None] = []
        for head in range(self.num_heads):
            self.outputs.append(self._output(head, blocks, vocab))
        if setting.is_int8:
            self._round()
        self._target: Lender | None = None

    def _round(self) -> None:
        """Take int8 weights; heads that share an output matrix go on sharing it."""
        self.blocks = [[rounded(block) for block in row] for row in self.blocks]
        matrices = {id(output): rounded(output) for output in self.outputs if output is not None}
        self.outputs = [None if output is None else matrices[id(output)] for output in self.outputs]

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights of their own."""
        return sum(x.num_bytes for row in self.blocks for x in row) + sum(
            {id(x): x.num_bytes for x in self.outputs if x is not None}.values()
        )

    def kv_shape(self) -> tuple[int, int]:
        """No layer has KV."""
        return 0, 0

    def attach(self, target: Lender) -> None:
        """Heads without an output matrix use the target's."""
        self._target = target

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """The state of a chain behind the target's normed hidden states [N, H]: they themselves."""
        return hidden

    def step(self, index: int, state: torch.Tensor, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        """Draft `index` (0: behind the anchor): (logits [N, Vd] f32, state). The drafts before it change nothing."""
        hidden = state
        for block in self.blocks[index]:
            hidden = hidden + F.silu(block(hidden))
        output = self.outputs[index]
        if output is not None:
            return output.wide(hidden), state
        assert self._target is not None, "the heads were not attached to their target"
        return self._target.compute_logits(hidden), state

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.checkpoint.take(name, shape).to(self.setting.device, self.setting.dtype).contiguous()

    def _stored_heads(self) -> int:
        """Heads among the weights, from the first on; the authors' own config.json names two where five are stored."""
        count = 0
        while not self.is_public and f"{self.prefix}{count}.0.linear.weight" in self.checkpoint:
            count += 1
        return count

    def _block(self, head: int, layer: int) -> Linear:
        name = f"blocks.{head}.layers.{layer}" if self.is_public else f"{self.prefix}{head}.{layer}.linear"
        weight = self.checkpoint.take(f"{name}.weight")
        if weight.shape != (self.width, self.width):
            raise ConfigError(
                f"draft hidden size {weight.shape[-1]} differs from target hidden size {self.width}: `{name}.weight` has the shape "
                f"{list(weight.shape)}",
                hint="choose heads trained for this target",
            )
        bias = self._take(f"{name}.bias", (self.width,)) if f"{name}.bias" in self.checkpoint else None
        return Linear(weight.to(self.setting.device, self.setting.dtype).contiguous(), bias)

    def _output(self, head: int, blocks: int, vocab: int) -> Linear | None:
        """A head's own output matrix; that of the first head where only one is stored; None, the target's, where none is."""
        names = [f"lm_heads.{h}.weight" if self.is_public else f"{self.prefix}{h}.{blocks}.weight" for h in range(self.num_heads)]
        stored = [name for name in names if name in self.checkpoint]
        if not stored:
            return None
        if stored == names[:1] and head:
            return self.outputs[0]
        return Linear(self._take(names[head], (vocab, self.width)))

    def _token_map(self) -> torch.Tensor | None:
        if "token_map" not in self.checkpoint:
            return None
        ids = self.checkpoint.take("token_map").long()
        if ids.ndim != 1 or len(ids.unique()) != len(ids) or not bool(((ids >= 0) & (ids < self.setting.vocab_size)).all()):
            raise ConfigError(
                f"token_map of the draft must hold different ids from 0 to {self.setting.vocab_size - 1}", hint="export the heads again"
            )
        return ids.to(self.setting.device)


def _first(hf_config: Any, *names: str, default: int) -> int:
    return next((int(value) for name in names if (value := getattr(hf_config, name, None)) is not None), default)
