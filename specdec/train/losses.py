"""The loss of draft rows against the target's law, on the draft vocabulary.

Owns: the LM head's product and its loss in one, in chunks, so that logits never lie in memory at once. Must not know: heads.
Letters: n rows, N laws, H hidden, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CHUNK_ROWS = 512  # 512 rows of 8,192 float32 logits are 16 MB


@dataclass(frozen=True, slots=True)
class Mix:
    """Weights of the parts: cross entropy -sum p log q, and distance sum |p - q|, whose half is the rate of rejection."""

    cross_entropy: float = 1.0
    distance: float = 0.0


class _LinearDraftLoss(torch.autograd.Function):
    """Loss and its gradient in one pass over chunks of rows; nothing of size [n, Vd] is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        laws: torch.Tensor,
        law_rows: torch.Tensor,
        row_weight: torch.Tensor,
        mix: Mix,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros(weight.shape, dtype=torch.float32)
        losses, overlaps = torch.empty(len(hidden)), torch.empty(len(hidden))
        for start in range(0, len(hidden), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            log_q = torch.log_softmax((hidden[rows] @ weight.T).float(), dim=-1)
            p = laws.index_select(0, law_rows[rows]).float()
            losses[rows] = -mix.cross_entropy * torch.linalg.vecdot(p, log_q)
            q = log_q.exp_()
            difference = q - p
            overlaps[rows] = 1 - 0.5 * difference.abs().sum(dim=-1)
            grad = difference * mix.cross_entropy  # a law sums to one
            if mix.distance:
                losses[rows] += mix.distance * 2 * (1 - overlaps[rows])
                sign = difference.sign_()
                grad += mix.distance * q * (sign - torch.linalg.vecdot(q, sign)[:, None])
            grad = grad.mul_(row_weight[rows, None]).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(overlaps)
        return (losses * row_weight).sum(), overlaps

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0], grad_weight * grads[0], None, None, None, None


def linear_draft_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    laws: torch.Tensor,
    law_rows: torch.Tensor,
    *,
    row_weight: torch.Tensor | None = None,
    mix: Mix = Mix(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss scalar, overlap [n] f32) of q = softmax(hidden W^T) against the laws p [N, Vd] at law_rows [n].

    hidden [n, H], weight [Vd, H] and laws in one dtype. row_weight [n] f32 should sum to one; None: the mean. overlap, without
    gradient, is sum min(p, q): the chance that a draft drawn from q is kept.
    """
    count = max(len(hidden), 1)
    weights = torch.full((len(hidden),), 1.0 / count) if row_weight is None else row_weight
    loss, overlap = _LinearDraftLoss.apply(hidden, weight, laws, law_rows, weights, mix)  # type: ignore[no-untyped-call]
    return loss, overlap


@torch.no_grad()
def draft_laws(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """The target's law on the draft vocabulary, renormalised: hidden [n, H], head [Vd, H] (the target's rows) -> [n, Vd] in their dtype."""
    laws = torch.empty(len(hidden), len(head), dtype=hidden.dtype)
    for start in range(0, len(hidden), CHUNK_ROWS):
        laws[start : start + CHUNK_ROWS] = torch.softmax((hidden[start : start + CHUNK_ROWS] @ head.T).float(), dim=-1)
    return laws
