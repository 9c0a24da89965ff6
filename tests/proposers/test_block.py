"""DFlash and DSpark in the engine: lossless, and every draft equal to a plain reference's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from specdec.config.checkpoints import draft_hf_config
from specdec.config.compatibility import flatten
from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import DflashConfig, DsparkConfig, NgramConfig
from specdec.config.methods import traits_for
from specdec.config.speculative import HybridConfig
from specdec.errors import ConfigError
from specdec.proposers.base import DraftBatch, StepView, build_proposer
from specdec.proposers.block import BlockProposer
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.ngram import NgramProposer
from tests.law.scoring import judge
from tests.models.block_reference import BlockSpec, PlainBlock, write_block_head
from tests.proposers.scenarios import SCENARIOS, Scenario, check_lossless
from tests.proposers.tiny import prompts, request, resolved_for, run

HEADS = {
    "dspark": BlockSpec(),
    "dflash": BlockSpec(method="dflash", has_qk_norm=False, draft_vocab=97),
    "gated": BlockSpec(markov="gated"),
    "rnn": BlockSpec(markov="rnn"),
    "fill-in": BlockSpec(is_speculators=True, from_anchor=False, has_confidence=False),
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_block_head(tmp_path_factory.mktemp(name), spec, seed=7) for name, spec in HEADS.items()}


def headed(
    target: Path, head: Path, drafts: int, *, method: str = "dspark", config: dict[str, Any] | None = None, **settings: Any
) -> ResolvedConfig:
    """The configuration of a tiny target with a block head, as resolve() would settle it."""
    kind = DflashConfig if method == "dflash" else DsparkConfig
    speculative = kind(model=str(head), num_speculative_tokens=drafts, **(config or {}))
    keys = flatten(json.loads((head / "config.json").read_text(encoding="utf-8")))
    traits = traits_for(speculative, keys, num_target_layers=LlamaConfig.from_pretrained(target).num_hidden_layers)
    resolved = resolved_for(target, traits=traits, speculative=speculative, **settings)
    return replace(resolved, draft_model_path=str(head), draft_hf_config=draft_hf_config(str(head), keys))


class Recording(BlockProposer):
    """Keeps, for every request that got drafts, its text at that moment and the drafts."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        super().__init__(resolved)
        self.seen: list[tuple[list[int], list[int], list[float]]] = []

    def propose(self, step: StepView) -> DraftBatch:
        batch = super().propose(step)
        for index, row in enumerate(step.rows.tolist()):
            if count := int(batch.num_nodes[index]):
                text = step.token_ids[row, : int(step.num_tokens[row])].tolist()
                trust = [] if batch.confidence is None else batch.confidence[index, :count].tolist()
                self.seen.append((text, batch.token_ids[index, :count].tolist(), trust))
        return batch


@pytest.mark.parametrize("drafts", [1, 4, 7])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("name", list(HEADS))
def test_a_block_is_lossless_and_drafts_what_the_reference_drafts(
    target_path: Path, heads: dict[str, Path], name: str, scenario: Scenario, drafts: int
) -> None:
    """The reference reads the whole text afresh, so a hole or a stale row in the context would show as another draft."""
    made: list[Recording] = []

    def make(resolved: ResolvedConfig) -> Recording:
        made.append(Recording(resolved))
        return made[-1]

    resolved = headed(target_path, heads[name], drafts, method=HEADS[name].method, **scenario.settings)
    check_lossless(target_path, scenario, traits=resolved.traits, make=make, build=lambda _: resolved)
    reference = PlainBlock(target_path, heads[name], HEADS[name])
    seen = made[0].seen
    assert len(seen) > 40
    for text, given, trust in seen[:: max(len(seen) // 20, 1)]:
        assert given == reference.drafts(text, len(given)), f"behind {len(text)} tokens"
        assert trust == pytest.approx(reference.confidences(text, len(given)), abs=1e-4)


@pytest.mark.parametrize("name", ["dspark", "dflash"])
def test_coupled_drafts_keep_seeded_tokens(target_path: Path, heads: dict[str, Path], name: str) -> None:
    for scenario in (SCENARIOS[1], SCENARIOS[6]):
        resolved = headed(
            target_path, heads[name], 4, method=HEADS[name].method, config={"draft_sample_method": "coupled"}, **scenario.settings
        )
        check_lossless(target_path, scenario, traits=resolved.traits, build=lambda _, resolved=resolved: resolved)


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("name", ["dspark", "dflash"])
def test_drawn_drafts_keep_the_law(target_path: Path, heads: dict[str, Path], name: str, rule: str) -> None:
    config = {"draft_sample_method": "probabilistic", "rejection_sample_method": rule}
    requests = [
        request(f"p{i}", text, temperature=0.8, max_tokens=60, seed=1000 + i) for i, text in enumerate(prompts(30, seed=3, longest=12))
    ]
    result = run(headed(target_path, heads[name], 3, method=HEADS[name].method, config=config, max_num_seqs=16), requests)
    assert judge(target_path, requests, result.token_ids).is_lawful
    assert result.num_accepted() > 0


@pytest.mark.parametrize("scenario", [SCENARIOS[2], SCENARIOS[4]], ids=lambda scenario: scenario.name)
def test_in_a_hybrid_its_context_stays_whole(target_path: Path, heads: dict[str, Path], scenario: Scenario) -> None:
    """Where a lookup drafts instead, the context goes on growing: the block's next drafts are the reference's."""
    lookup = NgramConfig(num_speculative_tokens=5, prompt_lookup_min=1, prompt_lookup_max=3)
    config = HybridConfig(sources=(lookup, DsparkConfig(model=str(heads["dspark"]), num_speculative_tokens=3)))
    alone = headed(target_path, heads["dspark"], 3, **scenario.settings)
    assert alone.traits is not None
    parts = [replace(alone, engine=replace(alone.engine, speculative=lookup), traits=traits_for(lookup)), alone]
    traits = traits_for(config, {"dspark": alone.draft_hf_config.to_dict()}, num_target_layers=2)
    resolved = replace(alone, engine=replace(alone.engine, speculative=config), traits=traits, sources=tuple(parts))
    recording = Recording(alone)

    def make(resolved: ResolvedConfig) -> HybridProposer:
        return HybridProposer(resolved, sources=[NgramProposer(parts[0]), recording])

    result = check_lossless(target_path, scenario, traits=traits, make=make, build=lambda _: resolved)
    assert {name for stats in result.stats.values() for name in stats.by_source} >= {"ngram", "dspark"}
    reference = PlainBlock(target_path, heads["dspark"], HEADS["dspark"])
    for text, given, _ in recording.seen[:: max(len(recording.seen) // 25, 1)]:
        assert given == reference.drafts(text, len(given))


# -- the checkpoint ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "drop", "more", "message"),
    [
        (BlockSpec(), ("markov_head.markov_w2.weight",), {}, "markov_head.markov_w2.weight"),
        (BlockSpec(), ("d2t",), {}, "d2t"),
        (BlockSpec(), (), {"selector.weight": torch.zeros(2, 2)}, "unexpected tensor `selector.weight`"),
        (BlockSpec(mask_token_id=97), (), {}, "mask_token_id is 97, but the vocabulary has 97 ids"),
        (BlockSpec(extra={"markov_head_type": "tree"}), (), {}, "markov_head_type is 'tree'"),
        (BlockSpec(markov="rnn"), ("markov_head.joint_proj.weight",), {}, "markov_head.joint_proj.weight"),
        (BlockSpec(extra={"architectures": ["DFlash2DraftModel"]}), (), {}, "DFlash2"),
        (BlockSpec(extra={"architectures": ["XPressDraftModel"]}), (), {}, "XPress"),
        (BlockSpec(taps=(1, 2, 3), extra={"target_layer_ids": [0, 1]}), (), {}, "fc.weight"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    target_path: Path, tmp_path: Path, spec: BlockSpec, drop: tuple[str, ...], more: dict[str, torch.Tensor], message: str
) -> None:
    head = write_block_head(tmp_path / "head", spec, drop=drop, more=more)
    with pytest.raises(ConfigError, match=message):
        BlockProposer(headed(target_path, head, 4))


def test_memory_and_sleep(target_path: Path, heads: dict[str, Path]) -> None:
    proposer = build_proposer(headed(target_path, heads["dspark"], 3))
    assert isinstance(proposer, BlockProposer)
    need = proposer.memory()
    assert need.kv_layers == ((2, 8),) * 2
    stored = sum(x.numel() * 4 for x in PlainBlock(target_path, heads["dspark"], HEADS["dspark"]).weights.values())
    assert 0.9 * stored < need.weights_bytes <= stored
    proposer.sleep()
    assert proposer.head is None
    proposer.wake()
    assert proposer.head is not None
