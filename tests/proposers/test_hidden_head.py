"""Medusa heads and MLP speculators in the engine: lossless, and every draft equal to a plain reference's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.config.checkpoints import draft_hf_config
from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import MedusaConfig, MlpSpeculatorConfig, NgramConfig
from specdec.config.methods import traits_for
from specdec.config.speculative import HybridConfig
from specdec.errors import ConfigError
from specdec.models.mlp_speculator import MlpSpeculator
from specdec.proposers.base import DraftBatch, StepView
from specdec.proposers.hidden_head import HiddenHeadProposer
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.ngram import NgramProposer
from tests.law.scoring import judge
from tests.models.hidden_head_reference import HiddenSpec, PlainHiddenHead, write_hidden_head
from tests.proposers.scenarios import SCENARIOS, Scenario, check_lossless
from tests.proposers.tiny import prompts, request, resolved_for, run

HEADS = {
    "medusa": HiddenSpec(),
    "medusa of vllm": HiddenSpec(style="vllm", num_blocks=2, has_token_map=True),
    "medusa on the target's head": HiddenSpec(style="bare"),
    "medusa_head.": HiddenSpec(style="prefixed"),
    "mlp": HiddenSpec(method="mlp_speculator", style="ibm"),
    "tied mlp": HiddenSpec(method="mlp_speculator", style="prefixed", ties=True, scales_input=True),
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_hidden_head(tmp_path_factory.mktemp("head"), spec, seed=7) for name, spec in HEADS.items()}


def headed(target: Path, head: Path, drafts: int, *, config: dict[str, Any] | None = None, **settings: Any) -> ResolvedConfig:
    keys = json.loads((head / "config.json").read_text(encoding="utf-8"))
    kind = MlpSpeculatorConfig if keys.get("model_type") == "mlp_speculator" else MedusaConfig
    speculative = kind(model=str(head), num_speculative_tokens=drafts, **(config or {}))
    traits = traits_for(speculative, keys, num_target_layers=2)
    resolved = resolved_for(target, traits=traits, speculative=speculative, **settings)
    return replace(resolved, draft_model_path=str(head), draft_hf_config=draft_hf_config(str(head), keys))


class Recording(HiddenHeadProposer):
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


@pytest.mark.parametrize("drafts", [1, 4])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("name", list(HEADS))
def test_heads_are_lossless_and_draft_what_the_reference_drafts(
    target_path: Path, heads: dict[str, Path], name: str, scenario: Scenario, drafts: int
) -> None:
    made: list[Recording] = []

    def make(resolved: ResolvedConfig) -> Recording:
        made.append(Recording(resolved))
        return made[-1]

    resolved = headed(target_path, heads[name], drafts, **scenario.settings)
    check_lossless(target_path, scenario, traits=resolved.traits, make=make, build=lambda _: resolved)
    reference = PlainHiddenHead(target_path, HEADS[name], seed=7)
    seen = made[0].seen
    assert len(seen) > 40
    for text, given in seen[:: max(len(seen) // 20, 1)]:
        assert given == reference.drafts(text, len(given)), f"behind {len(text)} tokens"


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("name", ["medusa of vllm", "mlp"])
def test_drawn_drafts_keep_the_law(target_path: Path, heads: dict[str, Path], name: str, rule: str) -> None:
    config = {"draft_sample_method": "probabilistic", "rejection_sample_method": rule}
    requests = [
        request(f"p{i}", text, temperature=0.8, max_tokens=60, seed=1000 + i) for i, text in enumerate(prompts(30, seed=3, longest=12))
    ]
    result = run(headed(target_path, heads[name], 3, config=config, max_num_seqs=16), requests)
    assert judge(target_path, requests, result.token_ids).is_lawful
    assert result.num_accepted() > 0


@pytest.mark.parametrize("name", ["medusa", "tied mlp"])
def test_coupled_drafts_keep_seeded_tokens(target_path: Path, heads: dict[str, Path], name: str) -> None:
    resolved = headed(target_path, heads[name], 4, config={"draft_sample_method": "coupled"}, **SCENARIOS[1].settings)
    check_lossless(target_path, SCENARIOS[1], traits=resolved.traits, build=lambda _: resolved)


def test_medusa_under_its_own_rule_accepts_more(target_path: Path, heads: dict[str, Path]) -> None:
    """Typical acceptance, the paper's, keeps drafts that the target finds likely enough; it changes the law and says so at start."""
    requests = [request(f"t{i}", text, temperature=1.0, max_tokens=60) for i, text in enumerate(prompts(12, seed=3, longest=12))]
    accepted = {}
    for rule in ("standard", "typical"):
        config = {"rejection_sample_method": rule}
        accepted[rule] = run(headed(target_path, heads["medusa"], 3, config=config), requests).num_accepted()
    assert accepted["typical"] > accepted["standard"]


def test_in_a_hybrid(target_path: Path, heads: dict[str, Path]) -> None:
    scenario = SCENARIOS[2]
    lookup = NgramConfig(num_speculative_tokens=5, prompt_lookup_min=1, prompt_lookup_max=3)
    alone = headed(target_path, heads["medusa"], 3, **scenario.settings)
    config = HybridConfig(sources=(lookup, MedusaConfig(model=str(heads["medusa"]), num_speculative_tokens=3)))
    parts = [replace(alone, engine=replace(alone.engine, speculative=lookup), traits=traits_for(lookup)), alone]
    traits = traits_for(config, {"medusa": {}}, num_target_layers=2)
    resolved = replace(alone, engine=replace(alone.engine, speculative=config), traits=traits, sources=tuple(parts))

    def make(resolved: ResolvedConfig) -> HybridProposer:
        return HybridProposer(resolved, sources=[NgramProposer(parts[0]), HiddenHeadProposer(alone)])

    result = check_lossless(target_path, scenario, traits=traits, make=make, build=lambda _: resolved)
    assert {name for stats in result.stats.values() for name in stats.by_source} >= {"ngram", "medusa"}


# -- checkpoints ---------------------------------------------------------------------------------------------------------


def test_tied_weights_may_be_stored_once(target_path: Path, tmp_path: Path) -> None:
    spec = HEADS["tied mlp"]
    later = [f"speculator.{part}.{i}.{kind}" for i in (1, 2, 3) for part, kind in (("emb", "weight"), ("head", "weight"), ("ln", "bias"))]
    lean = write_hidden_head(tmp_path / "lean", spec, seed=7, drop=[*later, "speculator.proj.2.weight", "speculator.proj.3.weight"])
    whole = write_hidden_head(tmp_path / "whole", spec, seed=7)
    heads = [HiddenHeadProposer(headed(target_path, path, 4)).head for path in (lean, whole)]
    assert all(isinstance(head, MlpSpeculator) for head in heads)
    assert heads[0].num_bytes == heads[1].num_bytes
    assert torch.equal(heads[0].embeddings[3], heads[1].embeddings[3])


@pytest.mark.parametrize(
    ("spec", "drop", "more", "message"),
    [
        (HiddenSpec(), ("2.0.linear.weight",), {}, r"2\.0\.linear\.weight"),
        (HiddenSpec(), ("2.1.weight",), {}, r"2\.1\.weight"),
        (HiddenSpec(), (), {"7.0.linear.weight": torch.zeros(2, 2)}, "unexpected tensor"),
        (HiddenSpec(width=16), (), {}, "draft hidden size 16 differs from target hidden size 32"),
        (HiddenSpec(num_heads=2), (), {}, "num_speculative_tokens is 3, but the draft checkpoint has 2 heads"),
        (HiddenSpec(style="vllm"), (), {"token_map": torch.tensor([1, 1])}, "token_map"),
        (HiddenSpec(method="mlp_speculator", width=48), (), {}, "emb_dim 48 differs from target hidden size 32"),
        (HiddenSpec(method="mlp_speculator"), ("ln.1.bias",), {}, r"ln\.1\.bias"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    target_path: Path, tmp_path: Path, spec: HiddenSpec, drop: tuple[str, ...], more: dict[str, torch.Tensor], message: str
) -> None:
    head = write_hidden_head(tmp_path / "head", spec, drop=drop, more=more)
    with pytest.raises(ConfigError, match=message):
        HiddenHeadProposer(headed(target_path, head, 3))
