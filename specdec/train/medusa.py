"""MedusaTraining: heads on the target's last hidden state, each of which learns one place further ahead.

Owns: the heads' weights while they are trained, and their loss. Must not know: batches' order, optimiser, files.
Source: Cai et al. 2401.10774 (Medusa-1: the target stays as it is). The heads share one LM head on the draft vocabulary, which keeps a
checkpoint small; what tells them apart is each one's residual block. Letters: B sequences, T tokens, K heads, H hidden, Vd vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from specdec.train.batches import Batch, predicted_rows
from specdec.train.evaluation import NO_DRAFT
from specdec.train.losses import draft_laws, linear_draft_loss
from specdec.train.warm_start import public_tensors

HEAD_DECAY = 0.8  # weight of each head against the one before (the authors')


class MedusaTraining(nn.Module):
    """The heads in float32; `dtype` is that of their arithmetic.

    target: text config of the target; head [V, H]: its LM head, frozen; draft_ids [Vd]: see draft_vocabulary.py. The heads read what the
    LM head reads: neither embedding nor taps.
    """

    def __init__(
        self,
        target: Any,
        *,
        embedding: torch.Tensor,
        head: torch.Tensor,
        draft_ids: torch.Tensor,
        taps: Sequence[int] = (),
        num_heads: int = 4,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        del embedding, taps
        super().__init__()
        width = target.hidden_size
        self.target, self.dtype, self.draft_ids = target, dtype, draft_ids
        self.target_head = head[draft_ids].to(dtype)
        self.blocks = nn.ParameterList([nn.Parameter(torch.zeros(width, width)) for _ in range(num_heads)])  # at first, the target's head
        self.lm_head = nn.Parameter(head[draft_ids].float().clone())

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (loss scalar, mean loss of each head [K])."""
        laws = draft_laws(batch.hidden.to(self.dtype).flatten(0, 1), self.target_head)
        owned, head = F.pad(batch.own[:, 1:], (0, 1)), self.lm_head.to(self.dtype)
        losses = []
        for index, state in enumerate(self.states(batch)):
            rows, law_rows = predicted_rows(owned, index + 1, width=state.shape[1])
            losses.append(linear_draft_loss(state.flatten(0, 1).index_select(0, rows), head, laws, law_rows)[0])
        parts = torch.stack(losses)
        decay = HEAD_DECAY ** torch.arange(len(losses))
        return (parts * decay).sum() / decay.sum(), parts.detach()

    def states(self, batch: Batch) -> list[torch.Tensor]:
        """What the LM head reads of each head, [B, T, H]: row t knows token t + 1, the anchor, only by the target's guess of it."""
        hidden = batch.hidden.to(self.dtype)
        return [hidden + F.silu(F.linear(hidden, block.to(self.dtype))) for block in self.blocks]

    @torch.no_grad()
    def drafts(self, batch: Batch) -> torch.Tensor:
        """The most likely ids [B, T, K]; see evaluation.Drafter. Row t drafts behind token t + 1."""
        found = torch.full((*batch.ids.shape, len(self.blocks)), NO_DRAFT)
        head = self.lm_head.to(self.dtype)
        for index, state in enumerate(self.states(batch)):
            found[:, 1:, index] = self.draft_ids[(state[:, :-1] @ head.T).argmax(dim=-1)]
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Views of the parameters under vLLM's names."""
        named = {f"blocks.{index}.layers.0.weight": block for index, block in enumerate(self.blocks)}
        named["lm_heads.0.weight"] = self.lm_head
        return named

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights as they are exported, without the vocabulary's maps."""
        return public_tensors(self.weights())

    def maps(self) -> dict[str, torch.Tensor]:
        """Target id of each draft id."""
        return {"token_map": self.draft_ids.clone()}

    def config(self) -> dict[str, Any]:
        """config.json of the exported heads."""
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size,
            "truncated_vocab_size": len(self.draft_ids),
            "num_heads": len(self.blocks),
            "num_hidden_layers": 1,
            "original_lm_head": True,  # one for all heads
            "torch_dtype": "bfloat16",
        }
