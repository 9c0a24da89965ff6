"""P-EAGLE heads in the engine: lossless, every draft equal to a plain reference's, drawn drafts by the law, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import NgramConfig
from specdec.config.methods import traits_for
from specdec.config.speculative import HybridConfig
from specdec.errors import ConfigError
from specdec.proposers.base import DraftBatch, StepView, build_proposer
from specdec.proposers.eagle import EagleProposer
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.parallel_head import ParallelHeadProposer
from tests.law.scoring import judge
from tests.models.eagle_reference import Spec, random_weights, write_head
from tests.proposers.heads import PlainHead, headed, plain_head
from tests.proposers.scenarios import SCENARIOS, Scenario, check_lossless
from tests.proposers.tiny import prompts, request, run

MASK = 90
AUTHORS = Spec(num_layers=2, has_tables=True, extra={"ptd_token_id": MASK})
SPECULATORS = replace(AUTHORS, is_speculators=True, fc_norm=True, extra={"speculators_model_type": "peagle", "mask_token_id": MASK})
HEADS = {"authors": AUTHORS, "speculators": SPECULATORS}
PARALLEL = {"parallel_drafting": True}


def write(path: Path, spec: Spec, *, numbers: int = 96) -> Path:
    """A random head with the learned state that stands for unknown ones, as exporters keep it: [1, 1, 3 Ht]."""
    mask = torch.randn(1, 1, numbers, generator=torch.Generator().manual_seed(5))
    return write_head(path, spec, random_weights(spec, seed=7) | {"mask_hidden": mask}, seed=7)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write(tmp_path_factory.mktemp(name), spec) for name, spec in HEADS.items()}


class Recording(ParallelHeadProposer):
    """Keeps, for every request that got drafts, its text at that moment and the drafts."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        super().__init__(resolved)
        self.seen: list[tuple[list[int], list[int]]] = []

    def propose(self, step: StepView) -> DraftBatch:
        batch = super().propose(step)
        for index, row in enumerate(step.rows.tolist()):
            if count := int(batch.num_nodes[index]):
                text = step.token_ids[row, : int(step.num_tokens[row])].tolist()
                self.seen.append((text, batch.token_ids[index, :count].tolist()))
        return batch


@torch.no_grad()
def one_pass(plain: PlainHead, text: Sequence[int], count: int) -> list[int]:
    """Drafts behind a text: one pass of the plain head over its rows and the masks, read afresh."""
    reference = plain.reference
    known = reference.features(plain.read(text[:-1])[1])
    states = reference.weights["mask_hidden"].view(-1).split(plain.spec.target_width)
    masks = reference.features([state.expand(count - 1, -1) for state in states])
    ids = torch.tensor([*text[1:], *[MASK] * (count - 1)])
    scored, _ = reference.rows(ids, torch.cat([known, masks]))
    return [plain.to_target(int(row.argmax())) for row in reference.logits(scored[len(text) - 2 :])]


@pytest.mark.parametrize("drafts", [1, 4, 7])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_head_is_lossless_and_drafts_what_the_reference_drafts(
    target_path: Path, heads: dict[str, Path], scenario: Scenario, drafts: int
) -> None:
    made: list[Recording] = []

    def make(resolved: ResolvedConfig) -> Recording:
        made.append(Recording(resolved))
        return made[-1]

    for name, spec in HEADS.items():
        resolved = headed(target_path, heads[name], spec, drafts, config=PARALLEL, **scenario.settings)
        check_lossless(target_path, scenario, traits=resolved.traits, make=make, build=lambda _, resolved=resolved: resolved)
        plain = plain_head(target_path, heads[name], spec)
        seen = made.pop().seen
        assert len(seen) > 40
        for text, given in seen[:: max(len(seen) // 20, 1)]:
            assert given == one_pass(plain, text, len(given)), f"{name} behind {len(text)} tokens"


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_drawn_drafts_keep_the_law(target_path: Path, heads: dict[str, Path], rule: str) -> None:
    config = PARALLEL | {"draft_sample_method": "probabilistic", "rejection_sample_method": rule}
    requests = [
        request(f"p{i}", text, temperature=0.8, max_tokens=60, seed=1000 + i) for i, text in enumerate(prompts(30, seed=3, longest=12))
    ]
    result = run(headed(target_path, heads["authors"], AUTHORS, 3, config=config, max_num_seqs=16), requests)
    assert judge(target_path, requests, result.token_ids).is_lawful
    assert result.num_accepted() > 0


def test_coupled_drafts_keep_seeded_tokens(target_path: Path, heads: dict[str, Path]) -> None:
    config = PARALLEL | {"draft_sample_method": "coupled"}
    resolved = headed(target_path, heads["speculators"], SPECULATORS, 4, config=config, **SCENARIOS[1].settings)
    check_lossless(target_path, SCENARIOS[1], traits=resolved.traits, build=lambda _: resolved)


def test_in_a_hybrid(target_path: Path, heads: dict[str, Path]) -> None:
    scenario = SCENARIOS[2]
    lookup = NgramConfig(num_speculative_tokens=5, prompt_lookup_min=1, prompt_lookup_max=3)
    alone = headed(target_path, heads["authors"], AUTHORS, 3, config=PARALLEL, **scenario.settings)
    config = HybridConfig(sources=(lookup, alone.engine.speculative))
    parts = [replace(alone, engine=replace(alone.engine, speculative=lookup), traits=traits_for(lookup)), alone]
    keys = json.loads((heads["authors"] / "config.json").read_text(encoding="utf-8"))
    traits = traits_for(config, {"eagle3": keys}, num_target_layers=2)
    resolved = replace(alone, engine=replace(alone.engine, speculative=config), traits=traits, sources=tuple(parts))

    def make(resolved: ResolvedConfig) -> HybridProposer:
        return HybridProposer(resolved, sources=[NgramProposer(parts[0]), ParallelHeadProposer(alone)])

    result = check_lossless(target_path, scenario, traits=traits, make=make, build=lambda _: resolved)
    assert {name for stats in result.stats.values() for name in stats.by_source} >= {"ngram", "eagle3"}


def test_the_same_head_drafts_either_way(target_path: Path, heads: dict[str, Path]) -> None:
    assert isinstance(build_proposer(headed(target_path, heads["authors"], AUTHORS, 3, config=PARALLEL)), ParallelHeadProposer)
    assert isinstance(build_proposer(headed(target_path, heads["authors"], AUTHORS, 3)), EagleProposer)


@pytest.mark.parametrize(
    ("spec", "numbers", "message"),
    [
        (AUTHORS, 0, "holds no `mask_hidden`"),
        (AUTHORS, 64, "mask_hidden of the draft has 64 numbers, but the states it stands for have 96"),
        (replace(AUTHORS, extra={"ptd_token_id": 97}), 96, "ptd_token_id is 97, but the embedding has ids 0 to 96"),
        (replace(AUTHORS, extra={}), 96, "names no mask token"),
    ],
)
def test_a_head_that_cannot_draft_in_one_pass_is_refused(target_path: Path, tmp_path: Path, spec: Spec, numbers: int, message: str) -> None:
    head = write(tmp_path / "head", spec, numbers=numbers) if numbers else write_head(tmp_path / "head", spec)
    with pytest.raises(ConfigError, match=message):
        build_proposer(headed(target_path, head, spec, 3, config=PARALLEL))
