"""EAGLE heads in the engine: lossless, every draft equal to a plain reference's, and aligned as the papers say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import Eagle3Config, NgramConfig
from specdec.config.methods import DraftKV, traits_for
from specdec.config.speculative import HybridConfig
from specdec.proposers.base import DraftSampling, build_proposer
from specdec.proposers.draft_vocabulary import DraftVocabulary
from specdec.proposers.eagle import EagleProposer
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.kept_rows import kept_rows
from specdec.proposers.ngram import NgramProposer
from tests.law.scoring import judge
from tests.models.eagle_reference import draft_ids, write_head
from tests.proposers.heads import EAGLE, EAGLE3, Behind, Recording, agreement, cross_entropy, headed, plain_head, train, write_teachable
from tests.proposers.scenarios import SCENARIOS, Scenario, check_lossless
from tests.proposers.tiny import Run, mixed_requests, plain, prompts, request, run, start
from tests.proposers.views import view

HEADS = {
    "eagle": EAGLE,
    "eagle3": EAGLE3,
    "speculators": replace(EAGLE3, is_speculators=True, has_tables=True, norm_before_residual=True, fc_norm=True, norm_output=True),
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_head(tmp_path_factory.mktemp(name), spec, seed=7) for name, spec in HEADS.items()}


@pytest.mark.parametrize("drafts", [1, 4, 7])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_head_is_lossless_and_drafts_what_the_reference_drafts(
    target_path: Path, heads: dict[str, Path], name: str, scenario: Scenario, drafts: int
) -> None:
    """The reference reads the whole text afresh, so a hole or a stale row in the draft KV would show as another draft."""
    made: list[Recording] = []

    def make(resolved: ResolvedConfig) -> Recording:
        made.append(Recording(resolved))
        return made[-1]

    resolved = headed(target_path, heads[name], HEADS[name], drafts, **scenario.settings)
    check_lossless(target_path, scenario, traits=resolved.traits, make=make, build=lambda _: resolved)
    reference = plain_head(target_path, heads[name], HEADS[name])
    seen = made[0].seen
    assert len(seen) > 40
    for text, given in seen[:: max(len(seen) // 25, 1)]:
        assert given == reference.drafts(text, len(given)), f"behind {len(text)} tokens"


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_chain_ends_where_the_head_doubts_it(target_path: Path, heads: dict[str, Path], name: str) -> None:
    """What is drafted is the beginning of what would be drafted anyway, cut before the chance of the whole falls below the threshold."""
    made: list[Recording] = []

    def make(resolved: ResolvedConfig) -> Recording:
        made.append(Recording(resolved))
        return made[-1]

    scenario, config = SCENARIOS[2], {"draft_confidence_threshold": 0.1}
    resolved = headed(target_path, heads[name], HEADS[name], 5, config=config, **scenario.settings)
    check_lossless(target_path, scenario, traits=resolved.traits, make=make, build=lambda _: resolved)
    reference = plain_head(target_path, heads[name], HEADS[name])
    lengths = set()
    for text, given in made[0].seen[:: max(len(made[0].seen) // 40, 1)]:
        drafts, chances = reference.drafts(text, 5), reference.chances(text, 5)
        assert given == drafts[: len(given)]
        together = 1.0
        for chance in chances[: len(given)]:
            together *= chance
        assert together >= 0.1 - 1e-4
        lengths.add(len(given))
    assert len(lengths) > 1


# -- sampled drafts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle", "speculators"])
def test_coupled_drafts_keep_seeded_tokens(target_path: Path, heads: dict[str, Path], name: str) -> None:
    for scenario in (SCENARIOS[1], SCENARIOS[6]):
        config = {"draft_sample_method": "coupled"}
        resolved = headed(target_path, heads[name], HEADS[name], 4, config=config, **scenario.settings)
        check_lossless(target_path, scenario, traits=resolved.traits, build=lambda _, resolved=resolved: resolved)


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_drawn_drafts_keep_the_law(target_path: Path, heads: dict[str, Path], name: str, rule: str) -> None:
    """A reduced vocabulary covers 40 of 97 tokens; the others come from the residual."""
    config = {"draft_sample_method": "probabilistic", "rejection_sample_method": rule}
    texts = prompts(30, seed=3, longest=12)
    requests = [request(f"p{i}", text, temperature=0.8, max_tokens=60, seed=1000 + i) for i, text in enumerate(texts)]
    result = run(headed(target_path, heads[name], HEADS[name], 3, config=config, max_num_seqs=16), requests)
    assert judge(target_path, requests, result.token_ids).is_lawful
    assert result.num_accepted() > 0
    seen = {token for ids in result.token_ids.values() for token in ids}
    assert name == "eagle" or seen - set(draft_ids(EAGLE3, seed=7).tolist())


# -- the parts -----------------------------------------------------------------------------------------------------------


def test_kept_rows_of_chunks_chains_and_trees() -> None:
    step = view(
        4,
        cu_query_lens=torch.tensor([0, 3, 7, 12, 14], dtype=torch.int32),
        num_rejected=torch.tensor([0, 2, 2, 0]),
        num_sampled=torch.tensor([0, 2, 3, 1]),
        path=torch.tensor([[-1, -1, -1], [0, 1, -1], [0, 2, 4], [0, -1, -1]]),
    )
    # a chunk; a chain of 3 drafts with 1 kept; a tree of 4 nodes with 2 kept; a prompt's last chunk
    assert kept_rows(step).tolist() == [0, 1, 2, 3, 4, 7, 9, 11, 12, 13]


def test_a_grammar_speaks_target_ids_and_a_head_draft_ids() -> None:
    asked = []

    def token_mask(depth: int, paths: dict[int, list[int]] | None = None) -> torch.Tensor | None:
        asked.append((depth, paths))
        return None if depth == 9 else torch.tensor([[True, False, False, True, True], [False] * 5])

    ones = torch.ones(2)
    sampling = DraftSampling(temperature=ones, seed=ones.long(), top_k=ones.long(), top_p=ones, token_mask=token_mask)
    vocabulary = DraftVocabulary(torch.tensor([1, 3, 4, 6]))  # the last id is past the grammar's vocabulary
    mask_of = vocabulary.sampling(sampling).token_mask
    assert mask_of is not None
    mask = mask_of(2, {0: [0, 3]})
    assert mask is not None
    assert mask.tolist() == [[False, True, True, False], [False] * 4]
    assert mask_of(9) is None
    assert asked == [(2, {0: [1, 6]}), (9, None)]
    assert DraftVocabulary(None).sampling(sampling) is sampling
    assert DraftVocabulary(None).to_target([5, 6]) == [5, 6]


def test_memory_and_sleep(target_path: Path, heads: dict[str, Path]) -> None:
    resolved = headed(target_path, heads["speculators"], HEADS["speculators"], 3)
    proposer = build_proposer(resolved)
    assert isinstance(proposer, EagleProposer)
    need = proposer.memory()
    assert need.kv_layers == ((2, 8),)
    assert need.kv_bytes_per_block == 2 * 4 * 2 * 8 * 4
    assert need.weights_bytes > 97 * 32 * 4
    assert (proposer.traits.kv, proposer.traits.taps, proposer.traits.lookahead) == (DraftKV.OWN, (0, 1, 2), 3)
    running = start(resolved, lambda _: proposer)
    proposer.sleep()
    assert proposer.head is None
    proposer.wake()
    proposer.reload()
    running.add(mixed_requests())
    assert running.finish().token_ids == plain(target_path, mixed_requests())


def test_drafts_end_at_the_configured_length(target_path: Path, heads: dict[str, Path]) -> None:
    resolved = headed(target_path, heads["eagle"], EAGLE, 3, config={"max_model_len": 20})
    made: list[Recording] = []
    requests = [request("a0", [5, 6, 7], max_tokens=30)]
    result = run(resolved, requests, lambda resolved: made.append(Recording(resolved)) or made[-1])  # type: ignore[func-returns-value]
    assert result.token_ids == plain(target_path, requests)
    assert max(len(text) + len(drafts) for text, drafts in made[0].seen) == 20


def test_an_abort_leaves_its_neighbours_alone(target_path: Path, heads: dict[str, Path]) -> None:
    running = start(headed(target_path, heads["eagle3"], EAGLE3, 4))
    running.add(mixed_requests())
    for _ in range(4):
        running.step()
    for name in ("r1", "r4"):
        running.core.abort(name)
    running.add([request("late", [9, 8, 7, 6, 5], max_tokens=12)])
    running.finish()
    expected = plain(target_path, mixed_requests())
    assert {name: running.token_ids[name] for name in ("r0", "r2", "r3", "r5")} == {
        name: expected[name] for name in ("r0", "r2", "r3", "r5")
    }
    assert running.token_ids["late"] == plain(target_path, [request("late", [9, 8, 7, 6, 5], max_tokens=12)])["late"]


@pytest.mark.parametrize("scenario", [SCENARIOS[2], SCENARIOS[4]], ids=lambda scenario: scenario.name)
def test_in_a_hybrid_its_kv_stays_whole(target_path: Path, heads: dict[str, Path], scenario: Scenario) -> None:
    """Where a lookup drafts instead, the head extends over what the lookup wrote."""
    lookup = NgramConfig(num_speculative_tokens=5, prompt_lookup_min=1, prompt_lookup_max=3)
    head = Eagle3Config(model=str(heads["eagle3"]), num_speculative_tokens=3)
    config = HybridConfig(sources=(lookup, head))
    alone = headed(target_path, heads["eagle3"], EAGLE3, 3, **scenario.settings)
    assert alone.traits is not None
    parts = [replace(alone, engine=replace(alone.engine, speculative=lookup), traits=traits_for(lookup)), alone]
    keys = {"eagle3": alone.draft_hf_config.to_dict()}
    traits = traits_for(config, keys, num_target_layers=2)
    resolved = replace(alone, engine=replace(alone.engine, speculative=config), traits=traits, sources=tuple(parts))
    recording = Recording(alone)

    def make(resolved: ResolvedConfig) -> HybridProposer:
        return HybridProposer(resolved, sources=[NgramProposer(parts[0]), recording])

    result = check_lossless(target_path, scenario, traits=traits, make=make, build=lambda _: resolved)
    sources = {name for stats in result.stats.values() for name in stats.by_source}
    assert sources >= {"ngram", "eagle3"}
    reference = plain_head(target_path, heads["eagle3"], EAGLE3)
    for text, given in recording.seen[:: max(len(recording.seen) // 25, 1)]:
        assert given == reference.drafts(text, len(given))


# -- alignment -----------------------------------------------------------------------------------------------------------


def accepted(result: Run) -> float:
    return result.num_accepted() / result.num_drafted()


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_trained_head_is_best_where_the_papers_align_it(tmp_path: Path, name: str) -> None:
    target = write_teachable(tmp_path / "target")
    spec = replace(HEADS[name], draft_vocab=97, has_tables=name == "eagle3", taps=(1, 2, 3) if name == "eagle3" else ())
    taught = plain_head(target, write_head(tmp_path / "raw", spec, seed=1), spec)
    train(taught, num_steps=400)
    path = write_head(tmp_path / "taught", spec, taught.reference.weights)

    texts = prompts(12, seed=21, shortest=40)
    rates = {shift: agreement(taught, texts, shift=shift) for shift in (-1, 0, 1, 2)}
    assert rates[0] > 3 * max(rate for shift, rate in rates.items() if shift)
    for taps in ((0, 1, 2), (2, 3, 4)) if spec.taps else ():
        other = replace(taught, spec=replace(spec, taps=taps))
        assert cross_entropy(taught, texts) < cross_entropy(other, texts) - 0.01, f"reading layers {taps}"

    requests = [request(f"a{i}", text, max_tokens=20) for i, text in enumerate(prompts(6, seed=22))]
    right = run(headed(target, path, spec, 1), requests)
    behind = run(headed(target, path, spec, 1), requests, Behind)
    assert right.token_ids == behind.token_ids == plain(target, requests)
    assert accepted(right) > max(0.2, 2 * accepted(behind))
