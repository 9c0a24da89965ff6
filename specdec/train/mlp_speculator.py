"""MlpSpeculatorTraining: a small recurrence over the target's last state learns to read each drafted token.

Owns: its weights while it is trained, and its loss. Must not know: batches' order, optimiser, files.
Source: Wertheimer et al. 2404.19124; names of foundation-model-stack, all steps tied. The format has no draft vocabulary, so tables of
all ids are trained: these are most of its weights. Letters: B sequences, T tokens, n steps, H hidden, D inner width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from specdec.train.batches import Batch, predicted_rows
from specdec.train.evaluation import NO_DRAFT
from specdec.train.layers import matrix, rms_norm
from specdec.train.losses import draft_laws, linear_draft_loss
from specdec.train.warm_start import public_tensors

EPS = 1e-6
STEP_DECAY = 0.8


class MlpSpeculatorTraining(nn.Module):
    """The recurrence in float32; `dtype` is that of its arithmetic.

    target: text config of the target; embedding and head [V, H]: its tables, of which the head gives the laws and the first weights;
    draft_ids: all ids. inner: D, None for H. shift: how far off it is trained, to see what alignment is worth.
    """

    def __init__(
        self,
        target: Any,
        *,
        embedding: torch.Tensor,
        head: torch.Tensor,
        draft_ids: torch.Tensor,
        taps: Sequence[int] = (),
        steps: int = 3,
        inner: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        shift: int = 0,
    ) -> None:
        assert len(draft_ids) == len(embedding), "the format has no draft vocabulary"
        del taps
        super().__init__()
        width = target.hidden_size
        self.inner = inner or width
        self.target, self.steps, self.dtype, self.shift, self.target_head = target, steps, dtype, shift, head.to(dtype)
        vocab, starts = target.vocab_size, self.inner == width
        self.first, self.further = matrix(self.inner, width), matrix(self.inner, self.inner)
        self.table = nn.Parameter(embedding.float().clone() if starts else torch.randn(vocab, self.inner))
        self.lm_head = nn.Parameter(head.float().clone()) if starts else matrix(vocab, self.inner)
        self.norm, self.norm_bias = nn.Parameter(torch.ones(self.inner)), nn.Parameter(torch.zeros(self.inner))
        state_weight = 0.5 ** (0.5 / steps)
        self.ratio = math.sqrt((1 - state_weight**2) * self.inner / 2) / state_weight

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (loss scalar, mean loss of each step [n])."""
        laws = draft_laws(batch.hidden.to(self.dtype).flatten(0, 1), self.target_head)
        owned, head = F.pad(batch.own[:, 1:], (0, 1)), self.lm_head.to(self.dtype)
        losses = []
        for index, state in enumerate(self.states(batch)):
            rows, law_rows = predicted_rows(owned, index + 1 + self.shift, width=state.shape[1])
            losses.append(linear_draft_loss(state.flatten(0, 1).index_select(0, rows), head, laws, law_rows)[0])
        parts = torch.stack(losses)
        decay = STEP_DECAY ** torch.arange(len(losses))
        return (parts * decay).sum() / decay.sum(), parts.detach()

    def states(self, batch: Batch) -> list[torch.Tensor]:
        """What the head reads at each step i, [B, T - 1 - i, D]: row t has read tokens t + 1 to t + 1 + i and predicts the one behind."""
        ones = torch.ones(batch.hidden.shape[-1])
        state = rms_norm(batch.hidden.to(self.dtype), ones, EPS) / math.sqrt(2)
        table, norm, bias = (x.to(self.dtype) for x in (self.table, self.norm, self.norm_bias))
        found = []
        for index in range(self.steps):
            rows = batch.ids.shape[1] - 1 - index
            weight = (self.further if index else self.first).to(self.dtype)
            mixed = F.linear(state[:, :rows], weight) + F.embedding(batch.ids[:, 1 + index :], table) * self.ratio
            state = F.gelu(rms_norm(mixed, norm, EPS) + bias)
            found.append(state)
        return found

    @torch.no_grad()
    def drafts(self, batch: Batch) -> torch.Tensor:
        """The most likely ids [B, T, n]; see evaluation.Drafter. Row t drafts behind token t + 1."""
        found = torch.full((*batch.ids.shape, self.steps), NO_DRAFT)
        head = self.lm_head.to(self.dtype)
        for index, state in enumerate(self.states(batch)):
            found[:, 1 : 1 + state.shape[1], index] = (state @ head.T).argmax(dim=-1)
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Views of the parameters under their public names; tied ones once."""
        named = {"proj.0.weight": self.first, "emb.0.weight": self.table, "head.0.weight": self.lm_head}
        named |= {"ln.0.weight": self.norm, "ln.0.bias": self.norm_bias}
        if self.steps > 1:
            named["proj.1.weight"] = self.further
        return {f"speculator.{name}": weight for name, weight in named.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights as they are exported."""
        return public_tensors(self.weights())

    def maps(self) -> dict[str, torch.Tensor]:
        """None: it drafts all ids."""
        return {}

    def config(self) -> dict[str, Any]:
        """config.json of the exported recurrence."""
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "emb_dim": self.target.hidden_size,
            "inner_dim": self.inner,
            "n_predict": self.steps,
            "n_candidates": 1,
            "top_k_tokens_per_head": [1] * self.steps,
            "tie_weights": True,
            "scale_input": True,
            "vocab_size": self.target.vocab_size,
            "torch_dtype": "bfloat16",
        }
