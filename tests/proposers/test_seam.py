"""The seam holds for every kind of draft method: whatever they propose, requests get exactly the tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.proposers.base import BaseProposer
from tests.proposers import seam_proposers as seam
from tests.proposers.scenarios import SCENARIOS, Scenario, check_lossless, truth
from tests.proposers.tiny import BLOCK_SIZE, mixed_requests, plain, request, resolved_for, run, start

TEMPERATURES = (0.0, 0.8)
Plain = dict[str, list[int]]
METHODS: dict[str, Callable[[Plain], BaseProposer]] = {
    "lookup": lambda _: seam.LookupProposer(),
    "chain": lambda _: seam.ChainProposer(),
    "block": lambda _: seam.BlockProposer(),
    "extend_only": lambda _: seam.ExtendOnlyProposer(),
    "extend_only_ahead": lambda _: seam.ExtendOnlyProposer(ahead=1),
    "ragged": lambda _: seam.RaggedProposer(),
    "two_branches": seam.TwoBranchProposer,
    "target_token": lambda _: seam.TargetTokenProposer(),
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("method", METHODS)
def test_ids_equal_plain_decoding(target_path: Path, method: str, scenario: Scenario) -> None:
    proposer = METHODS[method](truth(target_path, scenario))
    result = check_lossless(target_path, scenario, traits=proposer.traits, make=lambda _: proposer)
    if not method.startswith("extend_only"):
        assert result.num_drafted() > 0
    if isinstance(proposer, seam.ExtendOnlyProposer):
        assert proposer.num_audited > 500
        assert not scenario.name.startswith("prefix") or proposer.num_shared > 0
    if isinstance(proposer, seam.TargetTokenProposer):
        assert proposer.num_drawn > 20


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_right_branch_of_a_tree_is_kept_whole(target_path: Path, temperature: float) -> None:
    requests = [request("a", [1, 2, 3], temperature=temperature, max_tokens=40)]
    proposer = seam.TwoBranchProposer(plain(target_path, requests))
    stats = run(resolved_for(target_path, traits=proposer.traits), requests, lambda _: proposer).stats["a"]
    assert stats.accepted_per_pos[2] >= stats.num_drafts - 2, "all three right nodes are kept, but for trees cut at the request's end"
    assert stats.num_drafts <= 11


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_target_tokens_halve_the_passes(target_path: Path, temperature: float) -> None:
    """Each step emits its own sample and the one drawn by the drafting pass, which is not counted as a draft."""
    requests = [request("a", [1, 2, 3], temperature=temperature, max_tokens=21)]
    proposer = seam.TargetTokenProposer(max_nodes=1)
    result = run(resolved_for(target_path, traits=proposer.traits), requests, lambda _: proposer)
    assert result.token_ids == plain(target_path, requests)
    assert result.stats["a"].num_steps == 11
    assert result.num_drafted() == result.num_accepted() == 0


@pytest.mark.parametrize("sampling", [{"logprobs": 2}, {"repetition_penalty": 1.3}, {"logit_bias": {5: 4.0}}])
def test_target_tokens_are_not_drawn_past_processors_and_logprobs(target_path: Path, sampling: dict[str, object]) -> None:
    requests = [request("a", [1, 2, 3], temperature=0.8, **sampling), request("b", [4, 5, 6], temperature=0.8)]
    proposer = seam.TargetTokenProposer()
    result = run(resolved_for(target_path, traits=proposer.traits), requests, lambda _: proposer)
    assert result.token_ids == plain(target_path, requests)
    assert result.stats["a"].num_steps == 24 > result.stats["b"].num_steps


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_target_token_past_the_end_is_cut(target_path: Path, temperature: float) -> None:
    for max_tokens in range(1, 8):
        requests = [request("a", [1, 2, 3], temperature=temperature, max_tokens=max_tokens)]
        result = run(resolved_for(target_path, traits=seam.TargetTokenProposer().traits), requests, lambda _: seam.TargetTokenProposer())
        assert result.token_ids == plain(target_path, requests)
        assert result.reasons == {"a": "length"}


@pytest.mark.parametrize("method", METHODS)
def test_drafting_stops_at_the_end_of_the_model(target_path: Path, method: str) -> None:
    """Requests run up to max_model_len, where no position is left for drafts."""
    requests = [request(f"e{n}", [n, 2, 3], temperature=0.8, max_tokens=None) for n in range(3)]
    proposer = METHODS[method](plain(target_path, requests))
    result = run(resolved_for(target_path, traits=proposer.traits), requests, lambda _: proposer)
    assert result.token_ids == plain(target_path, requests)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("max_nodes", [1, 3, 8])
def test_an_oracle_is_accepted_whole(target_path: Path, temperature: float, max_nodes: int) -> None:
    requests = [request("a", [1, 2, 3], temperature=temperature, max_tokens=1 + 5 * (max_nodes + 1))]
    proposer = seam.OracleProposer(plain(target_path, requests), max_nodes)
    result = run(resolved_for(target_path, traits=proposer.traits), requests, lambda _: proposer)
    assert result.acceptance_length() == max_nodes + 1
    assert result.stats["a"].num_steps == 1 + 5
    assert result.stats["a"].accepted_per_pos == [5] * max_nodes


def test_an_anti_oracle_is_refused_whole(target_path: Path) -> None:
    requests = mixed_requests()
    expected = plain(target_path, requests)
    proposer = seam.OracleProposer(expected, 3, chance=0.0)
    result = run(resolved_for(target_path, traits=proposer.traits), requests, lambda _: proposer)
    assert result.token_ids == expected
    assert result.num_accepted() == 0
    assert all(stats.num_steps == len(expected[request_id]) for request_id, stats in result.stats.items())


@pytest.mark.law
@pytest.mark.parametrize(("chance", "max_nodes"), [(0.3, 2), (0.6, 4), (0.8, 3)])
def test_a_coin_meets_equation_1(target_path: Path, chance: float, max_nodes: int) -> None:
    """Mean tokens per step is (1 - p^(k+1)) / (1 - p). With fixed coins the test cannot flicker; the bound is 4 standard errors."""
    requests = [request(f"c{i}", [i, 2, 3], temperature=0.8, max_tokens=90) for i in range(8)]
    proposer = seam.OracleProposer(plain(target_path, requests), max_nodes, chance=chance)
    result = run(resolved_for(target_path, traits=proposer.traits), requests, lambda _: proposer)
    per_pos = [sum(stats.accepted_per_pos[i] for stats in result.stats.values()) for i in range(max_nodes)]
    steps = sum(stats.num_drafts for stats in result.stats.values())
    expected = (1 - chance ** (max_nodes + 1)) / (1 - chance)
    survival = [chance**i for i in range(1, max_nodes + 1)]
    mean_square = sum((2 * i + 1) * s for i, s in enumerate(survival))  # E[A^2] = sum (2i + 1) P(A > i)
    error = ((mean_square - (expected - 1) ** 2) / steps) ** 0.5
    assert abs(1 + sum(per_pos) / steps - expected) < 4 * error + 0.02, (per_pos, steps)


def test_block_size_is_smaller_than_the_prompts_that_hit() -> None:
    """The prefix scenarios are about several blocks, or they would prove nothing."""
    assert BLOCK_SIZE * 3 < 18


def test_released_rows_report_their_outcomes(target_path: Path) -> None:
    requests = [
        request("a", [1, 2, 3], max_tokens=5, tenant="t1"),
        request("b", [4, 5], max_tokens=9),
        request("gone", [6, 7], max_tokens=50),
    ]
    proposer = seam.RaggedProposer()
    running = start(resolved_for(target_path, traits=proposer.traits), lambda _: proposer)
    running.add(requests)
    for _ in range(3):
        running.step()
    running.core.abort("gone")
    kept = list(running.token_ids["gone"])
    running.finish()
    outcomes = {outcome.prompt_token_ids: outcome for outcome in proposer.released}
    assert outcomes[1, 2, 3].reason == outcomes[4, 5].reason == "length"
    assert list(outcomes[1, 2, 3].output_token_ids) == running.token_ids["a"]
    assert outcomes[1, 2, 3].tenant == "t1"
    assert outcomes[6, 7].reason == "abort"
    assert list(outcomes[6, 7].output_token_ids) == kept


def test_overlapped_steps_test_no_draft_twice(target_path: Path) -> None:
    """A plan made before the drafts were known has rows for more of them; what an earlier step left there is not tested again."""
    requests = [request(f"r{i}", [i, 2, 3], max_tokens=40) for i in range(4)]
    proposer = seam.RaggedProposer()
    result = run(resolved_for(target_path, traits=proposer.traits, async_scheduling=True), requests, lambda _: proposer)
    assert result.token_ids == plain(target_path, requests)
    assert 100 < result.num_drafted() <= proposer.num_proposed


def test_the_audit_sees_a_prefix_hit_whose_next_token_differs(target_path: Path) -> None:
    """A drafter whose KV reads one token ahead needs hashes that cover it: without prefill_lookahead the audit must fail."""
    text = list(range(4 * BLOCK_SIZE))
    first, second = [*text, 60, 61, 62], [*text, 70, 71, 72]
    for ahead in (1, 0):
        proposer = seam.ExtendOnlyProposer(ahead=1)
        proposer.traits = seam.traits(2, kv=proposer.traits.kv, lookahead=2, prefill_lookahead=ahead)
        running = start(resolved_for(target_path, traits=proposer.traits), lambda _, p=proposer: p)
        running.add([request("a", first, max_tokens=4)])
        while running.core.has_work:
            running.step()
        running.add([request("b", second, max_tokens=4)])
        if ahead:
            running.finish()
            assert running.num_cached_tokens["b"] == 3 * BLOCK_SIZE
        else:
            with pytest.raises(AssertionError, match="hole in the draft KV of b"):
                running.finish()
