"""Overlapped steps count drafts as plain steps do: those a grammar refused, those that were tested, and none that nobody made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.config.method_configs import NgramConfig
from specdec.engine.tokenizer import Tokenizer
from specdec.proposers.base import DraftBatch, StepView
from specdec.proposers.ngram import host_batch
from tests.proposers.seam_proposers import KnowsTruth
from tests.structured.test_generation import asks, may_draft, run
from tests.structured.vocabulary import TOOL

REQUESTS = [asks(f"r{seed}", seed=seed, prompt=(1, 2, 3 + seed), regex="([ab]{3}12){4,9}") for seed in range(6)]


class ForbiddenFirst(KnowsTruth):
    """Two branches at the anchor, one that the grammar forbids and one that is right. Trees are not cut before verification."""

    PARENTS = (-1, -1, 1)

    def propose(self, step: StepView) -> DraftBatch:
        wanted = [may_draft(step, index) for index in range(len(step.rows))]
        drafts = [[TOOL, *self.coming(step, index, 2)][:count] for index, count in enumerate(wanted)]
        batch = host_batch(drafts, source="seam")
        return replace(batch, parents=torch.tensor(self.PARENTS[: batch.token_ids.shape[1]]).expand_as(batch.token_ids))


def counts(result: Any) -> tuple[int, ...]:
    total = result.spec.total
    return (result.spec.num_invalid_tokens, total.num_draft_tokens, total.num_verified_tokens, total.num_accepted_tokens, total.num_drafts)


@pytest.mark.parametrize("drafter", ["tree", "lookup"])
def test_counts_are_those_of_plain_steps(drafter: str, target_path: Path, tokenizer: Tokenizer) -> None:
    """The answers end where their grammar does, so no order of drafts is cut by a length that is nearer than the host knows."""
    plain = run(target_path, tokenizer, REQUESTS)
    assert set(plain.reasons.values()) == {"stop"}

    def drafting(**settings: Any) -> Any:
        if drafter == "tree":
            return run(target_path, tokenizer, REQUESTS, proposer=ForbiddenFirst(plain.ids, 3), **settings)
        lookup = NgramConfig(num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=2)
        return run(target_path, tokenizer, REQUESTS, speculative=lookup, **settings)

    waiting, overlapped = drafting(), drafting(async_scheduling=True)
    assert overlapped.ids == waiting.ids == plain.ids
    assert counts(overlapped) == counts(waiting)
    invalid, tested, *_ = counts(overlapped)
    assert tested > 20
    assert (invalid > 20) == (drafter == "tree")
