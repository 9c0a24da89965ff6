"""DSparkTraining: a block head learns to fill blocks behind random anchors, its serial correction and its confidence with it.

Owns: what it has beside its layers (block_training.py), and its loss. Must not know: batches' order, optimiser, files.
Source: DSpark (2607.05147). Letters: B sequences, T tokens, A anchors of a sequence, G slots of a block,
H hidden, r rank, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from specdec.train.batches import Batch
from specdec.train.block_training import ANCHORS, SLOT_DECAY, BlockTraining
from specdec.train.evaluation import NO_DRAFT
from specdec.train.layers import matrix
from specdec.train.losses import Mix, linear_draft_loss
from specdec.train.public_config import shared_keys
from specdec.train.warm_start import public_tensors

RANK = 48  # keeps the exported head under 32 MB
MIX = Mix(cross_entropy=0.5, distance=0.5)  # the paper's 0.1 and 0.9 start slowly on little data


class DSparkTraining(BlockTraining):
    """The head in float32: as BlockTraining, with the recurrent correction and the confidence."""

    def __init__(
        self,
        target: Any,
        *,
        embedding: torch.Tensor,
        head: torch.Tensor,
        draft_ids: torch.Tensor,
        taps: Sequence[int] = (),
        num_layers: int = 2,
        slots: int = 7,
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
        self.markov_first = nn.Parameter(torch.randn(len(embedding), RANK) * 0.5)
        self.markov_second = nn.Parameter(torch.zeros(len(draft_ids), RANK))  # the correction begins as none
        self.joint, self.joint_bias = matrix(3 * RANK, 2 * RANK + target.hidden_size), nn.Parameter(torch.zeros(3 * RANK))
        self.confidence = nn.Parameter(torch.zeros(target.hidden_size + RANK))
        self.confidence_bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (loss scalar, mean rejection 1 - overlap of each slot [G])."""
        anchors, slots = self.draw_anchors(batch), self.block_length(batch.number)
        states = self.blocks(batch, anchors, slots)  # [B, A, G, H]
        rows, law_rows, slot = self.pick(batch, anchors, slots)
        embedded = F.embedding(self._previous(batch, anchors, slots), self.markov_first).to(self.dtype)  # [B, A, G, r]
        wide = torch.cat((states, self.corrections(states, embedded)), dim=-1).flatten(0, 2).index_select(0, rows)
        judged_by = torch.cat((states, embedded), dim=-1).flatten(0, 2).index_select(0, rows)
        head = torch.cat((self.lm_head, self.markov_second), dim=-1).to(self.dtype)  # base and correction are one product
        weight = torch.exp(-slot / SLOT_DECAY)
        weight = weight / weight.sum().clamp(min=1e-9)
        loss, overlap = linear_draft_loss(wide, head, self.laws(batch), law_rows, row_weight=weight, mix=MIX)
        trust = judged_by.detach().float() @ self.confidence + self.confidence_bias  # it reads the states, and does not bend them
        judged = F.binary_cross_entropy_with_logits(trust, overlap.clamp(0, 1), weight=weight, reduction="sum")
        count = torch.bincount(slot, minlength=self.slots).clamp(min=1)
        by_slot = torch.zeros(self.slots).index_add_(0, slot, 1 - overlap) / count
        return loss + judged, by_slot

    def corrections(self, states: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """What the correction reads at each slot, [..., G, r], from states [..., G, H] and the tokens before [..., G, r].

        The recurrent form: a small state is carried along the block, so a slot knows all tokens before it.
        """
        joint, carried, found = self.joint.to(self.dtype), torch.zeros_like(embedded[..., 0, :]), []
        for slot in range(states.shape[-2]):
            read = torch.cat((carried, embedded[..., slot, :], states[..., slot, :]), dim=-1)
            gate, fresh, out = F.linear(read, joint, self.joint_bias.to(self.dtype)).chunk(3, dim=-1)
            keep = torch.sigmoid(gate)
            carried = keep * carried + (1 - keep) * torch.tanh(fresh)
            found.append(torch.tanh(out))
        return torch.stack(found, dim=-2)

    def _previous(self, batch: Batch, anchors: torch.Tensor, slots: int) -> torch.Tensor:
        """The token before each slot's own [B, A, G]: its place's."""
        places = (anchors[:, :, None] + torch.arange(slots)).clamp(max=batch.ids.shape[1] - 1)
        return batch.ids.gather(1, places.flatten(1)).view(places.shape)

    @torch.no_grad()
    def drafts(self, batch: Batch) -> torch.Tensor:
        """The most likely ids [B, T, G]; see evaluation.Drafter. Every place of an answer is an anchor once."""
        found = torch.full((*batch.ids.shape, self.slots), NO_DRAFT)
        length, begin = batch.ids.shape[1], int(batch.own.any(dim=0).long().argmax())
        head = torch.cat((self.lm_head, self.markov_second), dim=-1).to(self.dtype)
        for first in range(begin, length, ANCHORS):
            anchors = torch.arange(first, min(first + ANCHORS, length))
            states = self.blocks(batch, anchors.expand(len(batch.ids), -1), self.slots)
            places = (anchors[:, None] + torch.arange(self.slots)).clamp(max=length - 1)  # what is drafted behind the text is not read
            embedded = F.embedding(batch.ids[:, places], self.markov_first).to(self.dtype)
            wide = torch.cat((states, self.corrections(states, embedded)), dim=-1)
            found[:, anchors] = self.draft_ids[(wide @ head.T).argmax(dim=-1)]
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Views of the parameters under their public names."""
        named = self.block_weights() | {"confidence_head.proj.bias": self.confidence_bias}
        named |= {"markov_head.markov_w1.weight": self.markov_first, "markov_head.markov_w2.weight": self.markov_second}
        named |= {"markov_head.joint_proj.weight": self.joint, "markov_head.joint_proj.bias": self.joint_bias}
        return named | {"confidence_head.proj.weight": self.confidence[None]}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights as they are exported, without the vocabulary's maps."""
        return public_tensors(self.weights())

    def config(self) -> dict[str, Any]:
        """config.json of the exported head."""
        own = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": self.slots, "mask_token_id": self.mask_token_id}
        own |= {"sample_from_anchor": True, "target_layer_ids": [tap - 1 for tap in self.taps]}
        own |= {"markov_rank": RANK, "markov_head_type": "rnn", "enable_confidence_head": True, "confidence_head_with_markov": True}
        return own | shared_keys(self.target, num_layers=len(self.layers), draft_vocab=len(self.draft_ids))
