"""ngram_gpu drafts what ngram drafts, request by request and step by step, and is as lossless."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import NgramGpuConfig
from specdec.config.methods import traits_for
from specdec.proposers.base import AdmitInfo, BaseProposer, DraftBatch, Outcome, StepView, build_proposer
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.ngram_gpu import NgramGpuProposer
from tests.proposers.scenarios import SCENARIOS, Scenario, check_lossless
from tests.proposers.tiny import resolved_for


class Pair(BaseProposer):
    """Both proposers on the same steps; the device one answers."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        self.host, self.device = NgramProposer(resolved), build_proposer(resolved)
        assert isinstance(self.device, NgramGpuProposer)
        self.traits = self.device.traits
        self.num_drafts = 0

    def admit(self, rows: list[int], infos: list[AdmitInfo]) -> None:
        self.host.admit(rows, infos)

    def release(self, rows: list[int], outcomes: list[Outcome]) -> None:
        self.host.release(rows, outcomes)

    def propose(self, step: StepView) -> DraftBatch:
        expected, drafts = self.host.propose(step), self.device.propose(step)
        assert torch.equal(drafts.num_nodes, expected.num_nodes)
        width = expected.token_ids.shape[1]
        assert torch.equal(drafts.token_ids[:, :width], expected.token_ids)
        assert all(ours == "ngram_gpu" for ours, source in zip(drafts.source, expected.source, strict=True) if source)
        self.num_drafts += int(drafts.num_nodes.sum())
        return drafts


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_it_drafts_what_ngram_drafts(target_path: Path, scenario: Scenario) -> None:
    speculative = NgramGpuConfig(num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)
    pairs: list[Pair] = []

    def build(resolved: ResolvedConfig) -> ResolvedConfig:
        return resolved_for(target_path, traits=traits_for(speculative), speculative=speculative, **scenario.settings)

    def make(resolved: ResolvedConfig) -> Pair:
        pairs.append(Pair(resolved))
        return pairs[-1]

    result = check_lossless(target_path, scenario, traits=traits_for(speculative), make=make, build=build)
    assert pairs[0].num_drafts > 0
    assert {source for stats in result.stats.values() for source in stats.by_source} == {"ngram_gpu"}
