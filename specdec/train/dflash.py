"""DFlashTraining: a block head whose masks each learn the token of their own place, all in one pass.

Owns: which slots predict what, and the loss. Must not know: batches' order, optimiser, files. Its layers: block_training.py.
Source: DFlash (2602.06036). Letters: B sequences, T tokens, A anchors of a sequence, G slots of a block: the anchor's and K masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specdec.train.batches import Batch
from specdec.train.block_training import ANCHORS, SLOT_DECAY, BlockTraining
from specdec.train.evaluation import NO_DRAFT
from specdec.train.losses import linear_draft_loss
from specdec.train.public_config import shared_keys
from specdec.train.warm_start import public_tensors


class DFlashTraining(BlockTraining):
    """The head in float32. slots: the anchor's and one for each draft."""

    def __init__(
        self,
        target: Any,
        *,
        embedding: torch.Tensor,
        head: torch.Tensor,
        draft_ids: torch.Tensor,
        taps: Sequence[int] = (),
        num_layers: int = 2,
        slots: int = 8,
        mask_token_id: int = 5,
        dtype: torch.dtype = torch.bfloat16,
        shift: int = 0,
    ) -> None:
        super().__init__(
            target,
            embedding=embedding,
            head=head,
            draft_ids=draft_ids,
            taps=taps,
            num_layers=num_layers,
            slots=slots,
            mask_token_id=mask_token_id,
            dtype=dtype,
            shift=shift,
        )

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (loss scalar, mean rejection 1 - overlap of each draft [K])."""
        anchors, slots = self.draw_anchors(batch), max(2, self.block_length(batch.number))
        states = self.blocks(batch, anchors, slots)[:, :, 1:]  # the anchor's own slot drafts nothing
        rows, law_rows, draft = self.pick(batch, anchors, slots - 1)
        weight = torch.exp(-draft / SLOT_DECAY)
        weight = weight / weight.sum().clamp(min=1e-9)
        hidden = states.flatten(0, 2).index_select(0, rows)
        loss, overlap = linear_draft_loss(hidden, self.lm_head.to(self.dtype), self.laws(batch), law_rows, row_weight=weight)
        drafts = self.slots - 1
        count = torch.bincount(draft, minlength=drafts).clamp(min=1)
        return loss, torch.zeros(drafts).index_add_(0, draft, 1 - overlap) / count

    @torch.no_grad()
    def drafts(self, batch: Batch) -> torch.Tensor:
        """The most likely ids [B, T, K]; see evaluation.Drafter. Every place of an answer is an anchor once."""
        found = torch.full((*batch.ids.shape, self.slots - 1), NO_DRAFT)
        length, begin = batch.ids.shape[1], int(batch.own.any(dim=0).long().argmax())
        head = self.lm_head.to(self.dtype)
        for first in range(begin, length, ANCHORS):
            anchors = torch.arange(first, min(first + ANCHORS, length))
            states = self.blocks(batch, anchors.expand(len(batch.ids), -1), self.slots)
            found[:, anchors] = self.draft_ids[(states[:, :, 1:] @ head.T).argmax(dim=-1)]
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Views of the parameters under their public names."""
        return self.block_weights()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights as they are exported, without the vocabulary's maps."""
        return public_tensors(self.weights())

    def config(self) -> dict[str, Any]:
        """config.json of the exported head."""
        reads = {"mask_token_id": self.mask_token_id, "target_layer_ids": [tap - 1 for tap in self.taps]}
        own = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": self.slots, "dflash_config": reads}
        return own | shared_keys(self.target, num_layers=len(self.layers), draft_vocab=len(self.draft_ids))
