"""The suffix method: lossless, learns from the right people only, forgets what it must, and says how much it holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import SuffixConfig
from specdec.config.methods import traits_for
from specdec.errors import ConfigError
from specdec.proposers.base import AdmitInfo, Outcome, build_proposer
from specdec.proposers.suffix import SuffixProposer
from specdec.proposers.suffix_cache import ResponseCache
from specdec.sampling_params import SamplingParams
from tests.engine.tokenizers_for_tests import toy_tokenizer
from tests.proposers import naive_suffix
from tests.proposers.scenarios import SCENARIOS, Scenario, check_lossless
from tests.proposers.tiny import plain, request, resolved_for, start

SEARCH = {"limit": 8, "factor": 2.0, "min_chance": 0.0}


def sharing(resolved: ResolvedConfig) -> ResolvedConfig:
    """The configuration with --suffix-share-responses."""
    return replace(resolved, engine=replace(resolved.engine, suffix_share_responses=True))


def suffix_resolved(path: Path, **config: object) -> ResolvedConfig:
    speculative = SuffixConfig(**config)
    return resolved_for(path, traits=traits_for(speculative), speculative=speculative)


@pytest.mark.parametrize("drafts", [1, 3, 16])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_ids_equal_plain_decoding(target_path: Path, scenario: Scenario, drafts: int) -> None:
    speculative = SuffixConfig(num_speculative_tokens=drafts, suffix_decoding_max_spec_factor=3.0, suffix_decoding_min_token_prob=0.0)

    def build(resolved: ResolvedConfig) -> ResolvedConfig:
        return resolved_for(target_path, traits=traits_for(speculative), speculative=speculative, **scenario.settings)

    proposers: list[SuffixProposer] = []

    def make(resolved: ResolvedConfig) -> SuffixProposer:
        proposers.append(SuffixProposer(sharing(resolved)))
        return proposers[-1]

    result = check_lossless(target_path, scenario, traits=traits_for(speculative), make=make, build=build)
    assert result.num_drafted() > 0
    assert proposers[0]._texts == {}, "rows are forgotten when requests end"
    assert proposers[0].cache.num_responses == len(result.token_ids)


def test_the_registry_builds_it_and_a_repeated_request_is_drafted_whole(target_path: Path) -> None:
    resolved = suffix_resolved(target_path, num_speculative_tokens=8)
    proposer = build_proposer(resolved)
    assert isinstance(proposer, SuffixProposer)
    expected = plain(target_path, [request("a", [1, 2, 3], max_tokens=30)])["a"]
    running = start(resolved, lambda _: proposer)
    for name, tenant in (("a", "key"), ("b", "key"), ("c", "other"), ("d", ""), ("e", "")):
        running.add([request(name, [1, 2, 3], max_tokens=30, tenant=tenant, seed=1)])
        while running.core.has_work:
            running.step()
        assert running.token_ids[name] == expected
    steps = {name: stats.num_steps for name, stats in running.stats.items()}
    assert steps["b"] < steps["a"] / 2, "the second request of a tenant repeats the first one's answer"
    assert steps["c"] == steps["d"] == steps["e"] == steps["a"], "nobody learns from another tenant, or from a stranger"
    assert proposer.cache.num_responses == 3
    assert running.stats["b"].by_source.keys() == {"suffix"}


def test_shared_responses_help_everybody(target_path: Path) -> None:
    resolved = suffix_resolved(target_path, num_speculative_tokens=8)
    running = start(resolved, lambda _: SuffixProposer(sharing(resolved)))
    for name, tenant in (("a", "key"), ("b", "")):
        running.add([request(name, [1, 2, 3], max_tokens=30, tenant=tenant, seed=1)])
        while running.core.has_work:
            running.step()
    assert running.stats["b"].num_steps < running.stats["a"].num_steps / 2


def test_drafts_in_the_engine_are_those_of_naive_counting(target_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = suffix_resolved(target_path, num_speculative_tokens=6, suffix_decoding_max_tree_depth=8)
    proposer = SuffixProposer(resolved)
    seen = []
    original = proposer.propose

    def propose(step):
        batch = original(step)
        for index, row in enumerate(step.rows.tolist()):
            if step.max_nodes[index] and int(step.num_sampled[index]):
                text = step.token_ids[row, : int(step.num_tokens[row])].tolist()
                expected = naive_suffix.continue_text([text], text, depth=8, limit=step.max_nodes[index], factor=1.0, min_chance=0.1)
                count = int(batch.num_nodes[index])
                assert tuple(batch.token_ids[index, :count].tolist()) == expected.token_ids
                torch.testing.assert_close(batch.confidence[index, :count], torch.tensor(expected.chances, dtype=torch.float32))
                seen.append(count)
        return batch

    monkeypatch.setattr(proposer, "propose", propose)
    running = start(resolved, lambda _: proposer)
    running.add([request(f"r{i}", [i, 2, 3, i, 2], max_tokens=40) for i in range(3)])
    running.finish()
    assert len(seen) > 60
    assert sum(seen) > 20


def test_responses_are_learnt_on_every_proper_end_and_only_then(target_path: Path) -> None:
    proposer = SuffixProposer(suffix_resolved(target_path))
    for reason, learnt in (("stop", 1), ("length", 2), ("abort", 3), ("preempt", 3), ("error", 3)):
        proposer.release([0], [Outcome(reason, (1, 2), (3, 4, 5), "key")])
        assert proposer.cache.num_responses == learnt
    proposer.release([0], [Outcome("stop", (1, 2), (), "key")])
    assert proposer.cache.num_responses == 3, "an empty answer is nothing to learn"


def test_the_cache_is_first_in_first_out_over_all_tenants() -> None:
    cache = ResponseCache(6, max_responses=3, max_bytes=10**9, is_shared=False)
    for turn, tenant in enumerate(("a", "b", "a", "b", "c")):
        cache.learn(tenant, [turn, 50, 51])
    assert cache.num_responses == 3
    assert cache.continue_text("a", [9, 0], **SEARCH).token_ids == ()
    assert cache.continue_text("a", [9, 2], **SEARCH).token_ids == (50, 51)
    assert cache.continue_text("b", [9, 1], **SEARCH).token_ids == ()
    assert cache.continue_text("b", [9, 2], **SEARCH).token_ids == ()
    assert cache.continue_text("c", [9, 4], **SEARCH).token_ids == (50, 51)


def test_the_cache_is_bounded_in_bytes_and_counts_exactly() -> None:
    cache = ResponseCache(24, max_responses=10_000, max_bytes=200_000, is_shared=False)
    generator = torch.Generator().manual_seed(0)
    for turn in range(300):
        cache.learn(f"t{turn % 3}", torch.randint(0, 40_000, (100,), generator=generator).tolist())
        assert cache.live_bytes <= 200_000
        assert cache.live_bytes == sum(tree.live_bytes for tree in cache._trees.values())
    assert 10 < cache.num_responses < 100
    assert cache.allocated_bytes < 3 * 200_000
    cache.learn("t0", list(range(40_000)))
    assert cache.num_responses == 0, "one response that is larger than the cache is not kept"
    assert cache.live_bytes == cache.allocated_bytes == 0


def test_no_cached_requests_turns_the_cache_off(target_path: Path) -> None:
    proposer = SuffixProposer(sharing(suffix_resolved(target_path, suffix_decoding_max_cached_requests=0)))
    proposer.release([0], [Outcome("stop", (1, 2), (3, 4, 5), "key")])
    assert proposer.cache.num_responses == proposer.num_bytes == 0
    assert proposer.memory().weights_bytes == 0


@pytest.mark.parametrize("as_lines", [False, True])
def test_a_corpus_serves_every_tenant(target_path: Path, tmp_path: Path, as_lines: bool) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    tokenizer = toy_tokenizer()
    tokenizer.hf.save_pretrained(tmp_path)
    corpus = tmp_path / ("corpus.jsonl" if as_lines else "corpus.txt")
    corpus.write_text(json.dumps("abc") + "\n\n" + json.dumps({"text": text}) if as_lines else text)
    resolved = suffix_resolved(target_path, suffix_corpus=str(corpus), num_speculative_tokens=8)
    object.__setattr__(resolved, "tokenizer_path", str(tmp_path))
    proposer = SuffixProposer(resolved)
    assert proposer.num_bytes > 0
    assert proposer.corpus.num_texts == (2 if as_lines else 1)
    found = proposer.corpus.continue_text(tokenizer.encode("a quick brown"), limit=6, factor=1.0, min_chance=0.1)
    assert tokenizer.decode(found.token_ids) == " fox j"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [("missing.txt", None, "cannot be read"), ("bad.jsonl", '"fine"\n{"txt": 1}', "line 2"), ("broken.jsonl", "{", "line 1")],
)
def test_a_bad_corpus_is_refused_by_name(target_path: Path, tmp_path: Path, name: str, content: str | None, words: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"suffix_corpus.*{words}"):
        SuffixProposer(suffix_resolved(target_path, suffix_corpus=str(path)))


def test_a_tenants_corpus_drafts_for_that_tenant_only(target_path: Path) -> None:
    proposer = SuffixProposer(suffix_resolved(target_path, num_speculative_tokens=6))
    empty = proposer.num_bytes
    info = proposer.corpora.add("key", "numbers", [[11, 12, 13, 14, 15], [21, 22]])
    assert (info.num_texts, info.num_tokens) == (2, 7)
    assert proposer.num_bytes == empty + info.num_bytes
    options = {"limit": 3, "factor": 1.0, "min_chance": 0.1}
    assert proposer.corpora.continue_text("key", [11, 12, 13], **options).token_ids == (14, 15)
    assert not proposer.corpora.continue_text("other", [11, 12, 13], **options).token_ids
    for tenant, expected in (("key", [13, 14]), ("other", [])):
        proposer.admit([0], [AdmitInfo(request_id="r", prompt_token_ids=(3, 11, 12), tenant=tenant, sampling=SamplingParams())])
        found = proposer._search(proposer._texts[0], 3)
        assert list(found.token_ids)[: len(expected)] == expected
        assert bool(found.token_ids) == bool(expected)
    assert proposer.corpora.remove("key", "numbers")
    assert not proposer.corpora.remove("key", "numbers")
    assert proposer.num_bytes == empty + sum(text.tree.allocated_bytes for text in proposer._texts.values())
