"""A proposer that draws random drafts from laws it makes up, in every layout that the seam allows, and mixes kinds in one batch."""

from __future__ import annotations

import torch

from specdec.config.methods import MethodTraits
from specdec.kernels.philox import PURPOSE_DRAFT, uniform
from specdec.kernels.reference import sample
from specdec.proposers.base import BaseProposer, Dense, DraftBatch, DraftLaw, Sparse, StepView
from tests.engine.tokenizers_for_tests import TOY_VOCAB_SIZE


class RandomLawProposer(BaseProposer):
    """Laws depend on the anchor's token and the draft's index only, so drafts are often wrong and sometimes right.

    layout: "dense", "mapped" (a reduced vocabulary in another order) or "sparse" (a support per row). Every third request drafts
    with certainty, every fifth drafts one token less.
    """

    def __init__(self, layout: str, *, max_nodes: int = 3) -> None:
        self.traits = MethodTraits(method="lawful", max_nodes=max_nodes, max_depth=max_nodes, laws="dense")
        self.layout = layout
        generator = torch.Generator().manual_seed(5)
        self.support = TOY_VOCAB_SIZE if layout == "dense" else 30
        self.table = torch.randn(TOY_VOCAB_SIZE, max_nodes, self.support, generator=generator) * 2
        self.id_map = torch.randperm(TOY_VOCAB_SIZE, generator=generator)[: self.support] if layout == "mapped" else None
        rows = [torch.randperm(TOY_VOCAB_SIZE, generator=generator)[: self.support] for _ in range(TOY_VOCAB_SIZE * max_nodes)]
        self.ids = torch.stack(rows).view(TOY_VOCAB_SIZE, max_nodes, self.support)
        self.ids[:, :, -1] = -1  # padding
        self.table[:, :, -1] = torch.where(torch.tensor(layout == "sparse"), -torch.inf, self.table[:, :, -1])

    def propose(self, step: StepView) -> DraftBatch:
        count, width = len(step.rows), self.traits.max_nodes
        place = step.num_tokens[step.rows] - 1
        anchor = step.token_ids[step.rows, place].long()
        logits = self.table[anchor]  # [R, K, S]
        limits = [min(most, width - (i % 5 == 4)) if int(step.num_sampled[i]) else 0 for i, most in enumerate(step.max_nodes)]
        one_hot = torch.arange(count) % 3 == 2
        drafts = torch.full((count, width), -1, dtype=torch.int64)
        for i in range(width):
            columns = sample(logits[:, i].softmax(-1), uniform(step.sampling.seed, place, purpose=PURPOSE_DRAFT, index=i))
            columns = torch.where(one_hot, logits[:, i].argmax(-1), columns)
            drafts[:, i] = self._target_ids(anchor, i, columns)
        unused = torch.arange(width)[None] >= torch.tensor(limits)[:, None]
        law = Sparse(self.ids[anchor], logits.log_softmax(-1)) if self.layout == "sparse" else Dense(logits, self.id_map)
        return DraftBatch(
            token_ids=drafts.masked_fill(unused, -1),
            num_nodes=torch.tensor(limits),
            source=["lawful" if n else "" for n in limits],
            law=DraftLaw(one_hot=one_hot, rows=law),
        )

    def _target_ids(self, anchor: torch.Tensor, i: int, columns: torch.Tensor) -> torch.Tensor:
        if self.layout == "sparse":
            return self.ids[anchor, i].gather(1, columns[:, None])[:, 0]
        return columns if self.id_map is None else self.id_map[columns]
