"""PEagleModel: an EAGLE-3 head that was trained to draft in one pass; unknown states are one learned vector, unknown tokens one mask id.

Owns: what stands in for the unknown. Must not know: requests, drawing, when it runs.
Source: P-EAGLE 2602.01469. Formats: the authors' (EAGLE-3's names beside `mask_hidden`) and speculators (`peagle`).
"""

from __future__ import annotations

from typing import Any

import torch

from specdec.errors import ConfigError
from specdec.models.draft_head import HeadReader, HeadSetting
from specdec.models.eagle3 import Eagle3Model
from specdec.models.loader import Checkpoint
from specdec.models.mask_token import mask_token_of


class PEagleModel(Eagle3Model):
    """The head of one checkpoint. mask_token_id: fed at every place behind the anchor.

    Raises:
        ConfigError: as Eagle3Model, or `mask_hidden` or the mask id is missing or does not fit.
    """

    def __init__(self, hf_config: Any, checkpoint: Checkpoint, setting: HeadSetting) -> None:
        self.mask_token_id = mask_token_of(hf_config, int(hf_config.vocab_size))
        super().__init__(hf_config, checkpoint, setting)

    def _read_mask(self, reader: HeadReader, setting: HeadSetting) -> None:
        if not reader.has("mask_hidden"):
            raise ConfigError(
                "speculative_config.parallel_drafting is true, but the draft checkpoint holds no `mask_hidden`",
                hint="drop parallel_drafting: an EAGLE-3 head drafts step by step",
            )
        stored = reader.checkpoint.take(f"{reader.base}mask_hidden")  # [n Ht], mostly behind dimensions of 1
        wide = len(setting.taps) * setting.target_width
        if stored.numel() != wide:
            raise ConfigError(
                f"mask_hidden of the draft has {stored.numel()} numbers, but the states it stands for have {wide}",
                hint="export the draft again, or choose one trained for this target",
            )
        self.mask_state = stored.view(len(setting.taps), -1).to(setting.device, setting.dtype).contiguous()

    def mask_feature(self) -> torch.Tensor:
        """The feature [1, H] that stands for states not known yet: the learned vector, joined as the target's states are."""
        return self.combine({tap: state[None] for tap, state in zip(self.taps, self.mask_state, strict=True)})
