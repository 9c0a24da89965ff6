"""A draft model that fills masks in one pass: lossless, and every draft equal to what transformers gives for the same rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import DraftModelConfig
from specdec.config.methods import traits_for
from specdec.proposers.base import DraftBatch, StepView, build_proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.parallel_draft import ParallelDraftProposer
from tests.law.scoring import judge
from tests.proposers.scenarios import SCENARIOS, Scenario, check_lossless
from tests.proposers.tiny import prompts, request, resolved_for, run, write_checkpoint

MASK = 7


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint(tmp_path_factory.mktemp("masked"), seed=3, num_layers=2)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"pard_token": MASK}))
    return path


def drafting(target: Path, draft: Path, drafts: int, *, config: dict[str, Any] | None = None, **settings: Any) -> ResolvedConfig:
    speculative = DraftModelConfig(model=str(draft), num_speculative_tokens=drafts, parallel_drafting=True, **(config or {}))
    resolved = resolved_for(target, traits=traits_for(speculative), speculative=speculative, **settings)
    return replace(resolved, draft_model_path=str(draft), draft_hf_config=LlamaConfig.from_pretrained(draft))


class Recording(ParallelDraftProposer):
    def __init__(self, resolved: ResolvedConfig) -> None:
        super().__init__(resolved)
        self.seen: list[tuple[list[int], list[int]]] = []

    def propose(self, step: StepView) -> DraftBatch:
        batch = super().propose(step)
        for index, row in enumerate(step.rows.tolist()):
            if count := int(batch.num_nodes[index]):
                self.seen.append((step.token_ids[row, : int(step.num_tokens[row])].tolist(), batch.token_ids[index, :count].tolist()))
        return batch


@pytest.mark.parametrize("drafts", [1, 4, 8])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_masks_are_filled_as_transformers_fills_them(target_path: Path, masked: Path, scenario: Scenario, drafts: int) -> None:
    made: list[Recording] = []

    def make(resolved: ResolvedConfig) -> Recording:
        made.append(Recording(resolved))
        return made[-1]

    resolved = drafting(target_path, masked, drafts, **scenario.settings)
    check_lossless(target_path, scenario, traits=resolved.traits, make=make, build=lambda _: resolved)
    model = LlamaForCausalLM.from_pretrained(masked, dtype=torch.float32).eval()
    seen = made[0].seen
    assert len(seen) > 40
    for text, given in seen[:: max(len(seen) // 20, 1)]:
        with torch.no_grad():
            logits = model(torch.tensor([[*text, *[MASK] * (len(given) - 1)]])).logits[0]
        assert given == logits[len(text) - 1 :].argmax(-1).tolist(), f"behind {len(text)} tokens"


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_drawn_drafts_keep_the_law(target_path: Path, masked: Path, rule: str) -> None:
    config = {"draft_sample_method": "probabilistic", "rejection_sample_method": rule}
    requests = [
        request(f"p{i}", text, temperature=0.8, max_tokens=60, seed=1000 + i) for i, text in enumerate(prompts(30, seed=3, longest=12))
    ]
    result = run(drafting(target_path, masked, 3, config=config, max_num_seqs=16), requests)
    assert judge(target_path, requests, result.token_ids).is_lawful
    assert result.num_accepted() > 0


def test_the_key_chooses_the_proposer(target_path: Path, masked: Path) -> None:
    resolved = drafting(target_path, masked, 3)
    assert isinstance(build_proposer(resolved), ParallelDraftProposer)
    stepwise = DraftModelConfig(model=str(masked), num_speculative_tokens=3)
    alone = replace(resolved, engine=replace(resolved.engine, speculative=stepwise), traits=traits_for(stepwise))
    assert type(build_proposer(alone)) is DraftModelProposer
