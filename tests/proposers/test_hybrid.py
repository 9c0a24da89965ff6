"""A hybrid is lossless whatever it mixes, keeps its losers' KV whole, and gives each request the source that helps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import DraftModelConfig, EarlyExitConfig, NgramConfig, SuffixConfig
from specdec.config.methods import DraftKV, MethodTraits, traits_for
from specdec.config.speculative import HybridConfig
from specdec.errors import ConfigError
from specdec.proposers.acceptance import AcceptanceBook, expected_accepted
from specdec.proposers.base import BaseProposer, Dense, DraftBatch, DraftLaw, build_proposer
from specdec.proposers.hybrid import HybridProposer
from specdec.sampling_params import SpeculationParams
from tests.proposers import seam_proposers as seam
from tests.proposers.scenarios import SCENARIOS, Scenario, check_lossless
from tests.proposers.tiny import Run, mixed_requests, plain, request, resolved_for, run, start, with_draft
from tests.proposers.views import view

NGRAM = NgramConfig(num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)
SUFFIX = SuffixConfig(num_speculative_tokens=6, suffix_decoding_max_spec_factor=2.0)


def hybrid(target: Path, *sources: object, draft: Path | None = None, **settings: object) -> ResolvedConfig:
    """What resolve() makes of a hybrid over these source configs."""
    config = HybridConfig(sources=sources)
    base = resolved_for(target, traits=traits_for(config), speculative=config, **settings)
    parts = []
    for source in config.inherited_sources():
        part = replace(base, engine=replace(base.engine, speculative=source), traits=traits_for(source))
        parts.append(with_draft(part, draft) if source.method == "draft_model" else part)
    return replace(base, sources=tuple(parts))


def mixes(target: Path, draft: Path) -> dict[str, tuple[object, ...]]:
    model = DraftModelConfig(model=str(draft), num_speculative_tokens=3)
    return {
        "lookups": (NGRAM, SUFFIX),
        "with_draft_model": (NGRAM, SUFFIX, model),
        "with_early_exit": (EarlyExitConfig(num_speculative_tokens=2, exit_layer=1), SUFFIX),
        "models_only": (model, EarlyExitConfig(num_speculative_tokens=2, exit_layer=1)),
    }


@pytest.mark.parametrize("mix", ["lookups", "with_draft_model", "with_early_exit", "models_only"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_ids_equal_plain_decoding(target_path: Path, draft_path: Path, mix: str, scenario: Scenario) -> None:
    resolved = hybrid(target_path, *mixes(target_path, draft_path)[mix], draft=draft_path, **scenario.settings)
    result = check_lossless(target_path, scenario, traits=resolved.traits, build=lambda _: resolved)
    assert result.num_drafted() > 0


def sources_of(result: Run, *, parity: int = 0) -> dict[str, list[int]]:
    """Drafted and accepted by source, over the requests whose number has this parity (even ones are greedy)."""
    total: dict[str, list[int]] = {}
    for name, stats in result.stats.items():
        if int(name[-1]) % 2 == parity:
            for source, (drafted, accepted) in stats.by_source.items():
                entry = total.setdefault(source, [0, 0])
                entry[0] += drafted
                entry[1] += accepted
    return total


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_loser_keeps_its_kv_whole(target_path: Path, scenario: Scenario) -> None:
    """The target is its own draft beside lookups that often win: whenever the draft model's turn comes, it must be right."""
    model = DraftModelConfig(model=str(target_path), num_speculative_tokens=3)
    resolved = hybrid(target_path, SUFFIX, model, draft=target_path, **scenario.settings)

    def make(resolved: ResolvedConfig) -> HybridProposer:
        lookup, drafter = (build_proposer(part) for part in resolved.sources)
        assert lookup is not None
        assert drafter is not None
        proposer = HybridProposer(resolved, sources=[EveryOther(lookup), drafter])
        return proposer

    result = check_lossless(target_path, scenario, traits=resolved.traits, make=make, build=lambda _: resolved)
    counts = sources_of(result)
    assert counts["suffix"][0] > 0
    drafted, accepted = counts["draft_model"]
    assert drafted > 20
    assert accepted == drafted


class EveryOther(BaseProposer):
    """A lookup that is very sure of itself, and silent in every other step."""

    def __init__(self, lookup: BaseProposer) -> None:
        self.lookup, self.traits, self.turn = lookup, lookup.traits, 0
        self.admit, self.release = lookup.admit, lookup.release

    def propose(self, step):
        self.turn += 1
        if self.turn % 2:
            return self.lookup.propose(replace(step, max_nodes=[0] * len(step.max_nodes)))
        batch = self.lookup.propose(step)
        return replace(batch, confidence=torch.full(batch.token_ids.shape, 9.0))


def test_a_request_may_name_its_source(target_path: Path, draft_path: Path) -> None:
    resolved = hybrid(target_path, *mixes(target_path, draft_path)["with_draft_model"], draft=draft_path)
    requests = [
        request(f"{name}{i}", [1, 2, 3, 1, 2], max_tokens=30, speculation=SpeculationParams(method=name))
        for i, name in enumerate(("ngram", "suffix", "draft_model", "unknown"))
    ]
    result = run(resolved, requests)
    assert result.token_ids == plain(target_path, requests)
    for name, stats in result.stats.items():
        assert set(stats.by_source) <= {name[:-1]}
    assert result.stats["draft_model2"].num_draft_tokens > 40
    assert result.stats["unknown3"].num_draft_tokens == 0


def test_a_lookup_that_fails_gives_way_to_a_model_that_is_right(target_path: Path) -> None:
    requests = mixed_requests()
    expected = plain(target_path, requests)
    resolved = hybrid(target_path, NGRAM, DraftModelConfig(model=str(target_path), num_speculative_tokens=3), draft=target_path)
    wrong = Named(seam.OracleProposer(expected, 4, chance=0.0), "ngram")
    drafter = build_proposer(resolved.sources[1])
    assert drafter is not None
    result = run(resolved, requests, lambda _: HybridProposer(resolved, sources=[wrong, drafter]))
    assert result.token_ids == expected
    counts = sources_of(result)
    assert counts["ngram"][1] == 0
    assert counts["draft_model"][1] > 3 * counts["ngram"][0]


def test_a_lookup_that_is_right_beats_a_model_that_fails(target_path: Path, draft_path: Path) -> None:
    requests = mixed_requests()
    expected = plain(target_path, requests)
    resolved = hybrid(target_path, NGRAM, DraftModelConfig(model=str(draft_path), num_speculative_tokens=3), draft=draft_path)
    drafter = build_proposer(resolved.sources[1])
    assert drafter is not None
    right = Named(seam.OracleProposer(expected, 4), "ngram")
    result = run(resolved, requests, lambda _: HybridProposer(resolved, sources=[right, drafter]))
    assert result.token_ids == expected
    assert sources_of(result).keys() == {"ngram"}, "four drafts promise more than three from the start, and they keep their word"


class Named(BaseProposer):
    """A test proposer under the name of a real method."""

    def __init__(self, inner: BaseProposer, name: str) -> None:
        self.inner, self.traits, self.admit = inner, replace(inner.traits, method=name), inner.admit

    def propose(self, step):
        batch = self.inner.propose(step)
        return replace(batch, source=[self.traits.method if source else "" for source in batch.source])


class Fixed(BaseProposer):
    """Answers with a given batch, and notes what it was asked."""

    def __init__(self, method: str, batch: DraftBatch, *, kv: DraftKV = DraftKV.NONE, laws: str = "one_hot") -> None:
        self.traits = MethodTraits(method=method, max_nodes=2, max_depth=2, kv=kv, laws=laws)
        self.batch = batch
        self.asked: list[list[int]] = []

    def propose(self, step):
        self.asked.append(list(step.max_nodes))
        keep = torch.tensor(step.max_nodes) > 0
        drawn = self.batch.target_token_ids
        return replace(
            self.batch,
            num_nodes=self.batch.num_nodes * keep,
            target_token_ids=None if drawn is None else torch.where(keep, drawn, -1),
        )


def test_rows_are_merged_with_their_trees_laws_and_drawn_tokens(target_path: Path) -> None:
    lookup = Fixed(
        "lookup",
        DraftBatch(
            token_ids=torch.tensor([[1, 2], [-1, -1], [5, 6]]),
            num_nodes=torch.tensor([2, 0, 2]),
            source=["lookup", "", "lookup"],
            parents=torch.tensor([[-1, -1], [-1, -1], [-1, -1]]),
        ),
    )
    law = DraftLaw(one_hot=torch.zeros(3, dtype=torch.bool), rows=Dense(torch.randn(3, 1, 97)))
    model = Fixed(
        "model",
        DraftBatch(
            token_ids=torch.tensor([[7], [8], [9]]),
            num_nodes=torch.tensor([1, 1, 1]),
            source=["model"] * 3,
            law=law,
            target_token_ids=torch.tensor([40, 41, 42]),
        ),
        kv=DraftKV.OWN,
        laws="dense",
    )
    model.traits = replace(model.traits, max_nodes=1)  # promises less than two drafts of a lookup
    proposer = HybridProposer(hybrid(target_path, NGRAM, SUFFIX), sources=[lookup, model])
    merged = proposer.propose(view(3, sources=[None, None, "lookup"]))
    assert model.asked == [[0, 1, 0]]
    assert merged.token_ids.tolist() == [[1, 2], [8, -1], [5, 6]]
    assert merged.num_nodes.tolist() == [2, 1, 2]
    assert merged.source == ["lookup", "model", "lookup"]
    assert merged.parents is not None
    assert merged.parents.tolist() == [[-1, -1], [-1, 0], [-1, -1]]
    assert merged.law is not None
    assert merged.law.one_hot.tolist() == [True, False, True]
    assert merged.law.rows is law.rows
    assert merged.target_token_ids is not None
    assert merged.target_token_ids.tolist() == [-1, 41, -1]
    assert merged.confidence is None


def test_memory_and_caches_are_split_by_source(target_path: Path, draft_path: Path) -> None:
    model = DraftModelConfig(model=str(draft_path), num_speculative_tokens=3)
    running = start(hybrid(target_path, SUFFIX, model, draft=draft_path))
    proposer = running.runner.proposer
    assert isinstance(proposer, HybridProposer)
    suffix, drafter = proposer.sources
    assert proposer.memory().weights_bytes == suffix.memory().weights_bytes + drafter.memory().weights_bytes
    assert proposer.memory().row_bytes == suffix.memory().row_bytes
    assert len(drafter.rail.kv) == len(drafter.memory().kv_layers) == 1


def test_two_sampled_sources_are_refused(target_path: Path) -> None:
    batch = DraftBatch(token_ids=torch.zeros(1, 0), num_nodes=torch.zeros(1), source=[""])
    sources = [Fixed(name, batch, kv=DraftKV.OWN, laws="dense") for name in ("one", "two")]
    with pytest.raises(ConfigError, match=r"one, two.*at most 1"):
        HybridProposer(hybrid(target_path, NGRAM, SUFFIX), sources=sources)


def test_the_book_follows_what_happens() -> None:
    book = AcceptanceBook(2)
    assert book.rate(0, 0) == book.rate(0, 1) == 0.5
    for _ in range(20):
        book.observe(0, 0, tested=3, accepted=3)
        book.observe(1, 1, tested=3, accepted=0)
    assert book.rate(0, 0) > 0.85
    assert book.rate(1, 1) < 0.25
    assert book.rate(7, 0) > 0.85, "a new request starts with what others showed"
    low = book.rate(1, 1)
    for _ in range(200):
        book.observe(1, 0, tested=1, accepted=1)
    assert book.rate(1, 1) > low, "a source that failed is tried again after a while"
    book.forget([0])
    assert book.rate(0, 0) == book.rate(7, 0)


def test_expected_accepted_is_the_sum_of_survivals() -> None:
    assert expected_accepted([]) == 0
    assert expected_accepted([0.5, 0.5]) == 0.75
    assert expected_accepted([1.0, 1.0, 0.0, 1.0]) == 2
