"""Several multi-token-prediction modules: lossless, and every draft equal to what they give over the whole text read afresh."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.config.engine import CacheConfig, EngineConfig, ModelConfig, ResolvedConfig
from specdec.config.resolve import resolve
from specdec.config.speculative import build
from specdec.errors import ConfigError
from specdec.proposers.base import DraftBatch, StepView, build_proposer
from specdec.proposers.eagle import EagleProposer
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.mtp_modules import MtpModulesProposer
from specdec.proposers.ngram import NgramProposer
from specdec.sampling_params import SpeculationParams
from tests.config.checkpoints import write_tokenizer
from tests.law.scoring import judge
from tests.proposers.scenarios import SCENARIOS, Scenario, check_lossless, drive
from tests.proposers.test_mtp import BLOCK, PlainModule, drafting, with_module
from tests.proposers.tiny import mixed_requests, plain, prompts, request, run

MODULES = 3
FIRST = {"deepseek": "model.layers.2.", "mimo": "model.mtp_layers.0."}
OTHERS = {"deepseek": ("model.layers.3.", "model.layers.4."), "mimo": ("model.mtp_layers.1.", "model.mtp_layers.2.")}


def with_modules(target: Path, out: Path, family: str) -> Path:
    """The target's checkpoint with three modules of different weights."""
    with_module(target, out, family, depth=MODULES)
    weights = load_file(out / "model.safetensors")
    generator = torch.Generator().manual_seed(21)
    first = {name: weight for name, weight in weights.items() if name.startswith(FIRST[family])}
    for base in OTHERS[family]:
        for name, weight in first.items():
            noise = torch.randn(weight.shape, generator=generator)
            weights[name.replace(FIRST[family], base)] = 1 + 0.2 * noise if weight.ndim == 1 else noise * weight.std()
    save_file(weights, out / "model.safetensors")
    return out


@pytest.fixture(scope="module")
def targets(target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: with_modules(target_path, tmp_path_factory.mktemp(family), family) for family in FIRST}


class PlainModules(PlainModule):
    """What the modules draft behind a text: each over all rows, its output the next one's states; then the last one again and again."""

    def __init__(self, target: Path, family: str, *, scored: Sequence[int] = range(97)) -> None:
        super().__init__(target, family, scored=scored)
        self.all = self.weights
        self.bases = (FIRST[family], *OTHERS[family])

    def use(self, index: int) -> None:
        """Make the rows those of module `index`."""
        first, base = self.bases[0], self.bases[index]
        self.weights = {name.replace(base, first): weight for name, weight in self.all.items() if name.startswith(base)}

    @torch.no_grad()
    def drafts(self, text: list[int], count: int) -> list[int]:
        states, found = self.features(text[:-1]), []
        for index in range(min(count, MODULES)):
            self.use(index)
            ids = torch.tensor([*text[1 + index :], *found])
            before, states = states, self.rows(ids, states)
            found.append(self.best(states[-1]))
        while len(found) < count:
            before = torch.cat([before, states[-1:]])
            states = self.rows(torch.tensor([*text[MODULES:], *found]), before)
            found.append(self.best(states[-1]))
        return found


class Recording(MtpModulesProposer):
    def __init__(self, resolved: ResolvedConfig) -> None:
        super().__init__(resolved)
        self.seen: list[tuple[list[int], list[int]]] = []

    def propose(self, step: StepView) -> DraftBatch:
        batch = super().propose(step)
        for index, row in enumerate(step.rows.tolist()):
            if count := int(batch.num_nodes[index]):
                self.seen.append((step.token_ids[row, : int(step.num_tokens[row])].tolist(), batch.token_ids[index, :count].tolist()))
        return batch


@pytest.mark.parametrize("drafts", [3, 6])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("family", list(FIRST))
def test_modules_are_lossless_and_draft_what_the_reference_drafts(
    targets: dict[str, Path], family: str, scenario: Scenario, drafts: int
) -> None:
    """A row that kept the KV of a refused draft, or a hole behind a prefix hit, would show as another draft."""
    made: list[Recording] = []

    def make(resolved: ResolvedConfig) -> Recording:
        made.append(Recording(resolved))
        return made[-1]

    resolved = drafting(targets[family], drafts, **scenario.settings)
    check_lossless(targets[family], scenario, traits=resolved.traits, make=make, build=lambda _: resolved)
    reference = PlainModules(targets[family], family)
    seen = made[0].seen
    assert len(seen) > 40
    for text, given in seen[:: max(len(seen) // 20, 1)]:
        assert given == reference.drafts(text, len(given)), f"behind {len(text)} tokens"


def test_a_request_that_drafted_nothing_leaves_true_rows_to_those_that_share_its_prefix(targets: dict[str, Path]) -> None:
    text = prompts(1, seed=9, shortest=30)[0]
    made: list[Recording] = []

    def make(resolved: ResolvedConfig) -> Recording:
        made.append(Recording(resolved))
        return made[-1]

    quiet = request("q1", text, max_tokens=20, speculation=SpeculationParams(enabled=False))
    path = targets["deepseek"]
    resolved = drafting(path, 3)
    follow = [*text, *plain(path, [request("q1", text, max_tokens=20)])["q1"], 3]
    result = drive(resolved, [[quiet], [request("q2", follow, max_tokens=20)]], make)
    assert result.num_cached_tokens["q2"] > 40
    reference = PlainModules(path, "deepseek")
    assert made[0].seen
    assert all(given == reference.drafts(behind, len(given)) for behind, given in made[0].seen)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_drawn_drafts_keep_the_law(targets: dict[str, Path], rule: str) -> None:
    config: dict[str, Any] = {"draft_sample_method": "probabilistic", "rejection_sample_method": rule}
    requests = [
        request(f"p{i}", text, temperature=0.8, max_tokens=60, seed=1000 + i) for i, text in enumerate(prompts(30, seed=3, longest=12))
    ]
    result = run(drafting(targets["deepseek"], 3, config=config, max_num_seqs=16), requests)
    assert judge(targets["deepseek"], requests, result.token_ids).is_lawful
    assert result.num_accepted() > 0


@pytest.mark.parametrize("drafts", [1, 3, 6])
def test_coupled_drafts_keep_seeded_tokens(targets: dict[str, Path], drafts: int) -> None:
    resolved = drafting(targets["mimo"], drafts, config={"draft_sample_method": "coupled"}, **SCENARIOS[1].settings)
    check_lossless(targets["mimo"], SCENARIOS[1], traits=resolved.traits, build=lambda _: resolved)


def test_one_draft_needs_one_module(targets: dict[str, Path]) -> None:
    assert isinstance(build_proposer(drafting(targets["deepseek"], 1)), EagleProposer)
    assert isinstance(build_proposer(drafting(targets["deepseek"], 3)), MtpModulesProposer)


def test_memory_counts_every_module(targets: dict[str, Path]) -> None:
    proposer = build_proposer(drafting(targets["mimo"], 3))
    assert proposer is not None
    need = proposer.memory()
    assert need.kv_layers == ((2, 8),) * MODULES
    matrices = sum(shape[0] * shape[1] for shape in BLOCK.values() if len(shape) == 2) + 32 * 64
    assert need.weights_bytes == MODULES * 4 * matrices


def test_a_damaged_module_is_named(target_path: Path, tmp_path: Path) -> None:
    path = with_modules(target_path, tmp_path / "two", "deepseek")
    weights = load_file(path / "model.safetensors")
    save_file({name: weight for name, weight in weights.items() if name != "model.layers.4.hnorm.weight"}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.layers\.4\.hnorm"):
        build_proposer(drafting(path, 3))
    save_file(weights | {"model.layers.4.surprise.weight": torch.ones(2)}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"unexpected tensor `model\.layers\.4\.surprise"):
        build_proposer(drafting(path, 3))


def test_in_a_hybrid_resolved_as_a_user_asks_for_it(targets: dict[str, Path], tmp_path: Path) -> None:
    """Where the lookup drafts, the modules only extend: each of their drafts must still be that of the whole text."""
    shutil.copytree(targets["deepseek"], path := tmp_path / "target")
    write_tokenizer(path, ("<unk>", "<eos>", *(f"w{i}" for i in range(95))))
    lookup = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    engine = EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", max_model_len=96),
        cache=CacheConfig(block_size=4, num_blocks=60),
        speculative=build({"method": "hybrid", "sources": [lookup, {"method": "mtp"}]}),
        device="cpu",
    )
    resolved = resolve(engine)
    made: list[Recording] = []

    def make(resolved: ResolvedConfig) -> HybridProposer:
        made.append(Recording(resolved.sources[1]))
        return HybridProposer(resolved, sources=[NgramProposer(resolved.sources[0]), made[0]])

    requests = mixed_requests(max_tokens=40)
    result = run(resolved, requests, make)
    assert result.token_ids == plain(path, requests)
    assert {name for stats in result.stats.values() for name in stats.by_source} == {"ngram", "mtp"}
    reference = PlainModules(path, "deepseek")
    seen = made[0].seen
    assert len(seen) > 40
    assert all(given == reference.drafts(text, len(given)) for text, given in seen[::5])
