"""Overlapped steps give every client what plain steps give: the same ids, text and end, whatever drafts, preempts, leaves or stops.

The oracle is the same engine with async_scheduling off. Both are fed one random workload of up to 16 requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import DraftModelConfig, NgramConfig, SuffixConfig
from specdec.config.methods import traits_for
from specdec.config.speculative import HybridConfig
from tests.e2e.async_workloads import Outcome, Workload, serve, workload
from tests.models.eagle_reference import write_head
from tests.proposers.heads import EAGLE3, headed
from tests.proposers.tiny import resolved_for, with_draft, write_checkpoint

NGRAM = NgramConfig(num_speculative_tokens=5, prompt_lookup_min=1, prompt_lookup_max=3)
ADAPTIVE = NgramConfig(num_speculative_tokens=5, prompt_lookup_min=1, prompt_lookup_max=3, policy="adaptive")
SUFFIX = SuffixConfig(num_speculative_tokens=6, suffix_decoding_max_spec_factor=2.0)
METHODS = ("off", "ngram", "suffix", "draft_model", "eagle3", "hybrid", "adaptive", "structured")
NUM_QUICK, NUM_ALL = 40, 500


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ResolvedConfig]:
    """(method, settings of the scheduler and cache) -> configuration. The draft model is the target itself, so that much is kept."""
    target = write_checkpoint(tmp_path_factory.mktemp("target"), seed=1)
    head = write_head(tmp_path_factory.mktemp("head"), EAGLE3, seed=7)

    def one(method: str, **settings: object) -> ResolvedConfig:
        match method:
            case "off":
                return resolved_for(target, **settings)
            case "eagle3":
                return headed(target, head, EAGLE3, 3, **settings)
            case "hybrid":
                return hybrid(target, **settings)
            case "draft_model":
                model = DraftModelConfig(model=str(target), num_speculative_tokens=3)
                return with_draft(resolved_for(target, traits=traits_for(model), speculative=model, **settings), target)
        config = {"suffix": SUFFIX, "adaptive": ADAPTIVE}.get(method, NGRAM)
        return resolved_for(target, traits=traits_for(config), speculative=config, **settings)

    return one


def hybrid(target: Path, **settings: object) -> ResolvedConfig:
    """Lookups before a draft model, each part as if it ran alone."""
    model = DraftModelConfig(model=str(target), num_speculative_tokens=3)
    config = HybridConfig(sources=(SUFFIX, model))
    base = resolved_for(target, traits=traits_for(config), speculative=config, **settings)
    parts = [replace(base, engine=replace(base.engine, speculative=part), traits=traits_for(part)) for part in config.inherited_sources()]
    return replace(base, sources=(parts[0], with_draft(parts[1], target)))


def compare(build: Callable[..., ResolvedConfig], seeds: Iterable[int]) -> Counter[str]:
    """Assert that each workload comes out the same both ways; count what happened under overlap."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        method = METHODS[seed % len(METHODS)]
        work = workload(seed, structured=method == "structured")
        plain = serve(build(method, **work.settings, async_scheduling=False), work)
        overlapped = serve(build(method, **work.settings, async_scheduling=True), work)
        check_same(plain, overlapped, work, name=f"seed {seed}, {method}")
        seen += what_happened(overlapped)
    return seen


def check_same(plain: Outcome, overlapped: Outcome, work: Workload, *, name: str) -> None:
    """Who was not aborted gets the same; who was gets the beginning of the same, as far as it went before the client left."""
    for _, request in work.arrivals:
        one = request.request_id
        first, second = plain.run.token_ids[one], overlapped.run.token_ids[one]
        if one in work.aborts:
            length = min(len(first), len(second))
            assert first[:length] == second[:length], f"{name}, {one}, aborted"
            continue
        assert second == first, f"{name}, {one}: {request.sampling}"
        assert overlapped.texts[one] == plain.texts[one], f"{name}, {one}"
        assert overlapped.reasons[one] == plain.reasons[one], f"{name}, {one}"


def what_happened(outcome: Outcome) -> Counter[str]:
    """Counts of the events that a workload is there for."""
    stats = outcome.run.core.stats
    return Counter(
        preemptions=stats.gauges.num_preemptions,
        accepted=stats.spec.total.num_accepted_tokens,
        refused=stats.spec.total.num_draft_tokens - stats.spec.total.num_verified_tokens,
        cut_in_a_block=outcome.num_cut_drafts,
        aborts=sum(reason == "abort" for reason, _ in outcome.reasons.values()),
        stops=sum(reason == "stop" for reason, _ in outcome.reasons.values()),
        lengths=sum(reason == "length" for reason, _ in outcome.reasons.values()),
    )


def test_forty_random_workloads_come_out_the_same(build: Callable[..., ResolvedConfig]) -> None:
    seen = compare(build, range(NUM_QUICK))
    assert min(seen.values()) > 10, f"an event is missing, so nothing was shown about it: {seen}"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_five_hundred_random_workloads_come_out_the_same(build: Callable[..., ResolvedConfig]) -> None:
    seen = compare(build, range(NUM_ALL))
    assert min(seen.values()) > 100, f"an event is missing, so nothing was shown about it: {seen}"
