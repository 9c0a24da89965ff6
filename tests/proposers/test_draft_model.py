"""A draft model and the target's own first layers: lossless, and without holes in the draft KV.

The strongest check is the target as its own draft: every greedy draft must be accepted, whatever the scheduler does in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import DraftModelConfig, EarlyExitConfig
from specdec.config.methods import traits_for
from specdec.errors import ConfigError
from specdec.proposers.base import build_proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.early_exit import EarlyExitProposer
from specdec.sampling_params import SpeculationParams
from tests.proposers.scenarios import SCENARIOS, Scenario, check_lossless, drive
from tests.proposers.tiny import Run, mixed_requests, plain, request, resolved_for, run, start, with_draft, write_checkpoint

Configure = Callable[..., ResolvedConfig]


def drafted(target: Path, draft: Path, drafts: int, *, config: dict[str, object] | None = None, **settings: object) -> ResolvedConfig:
    speculative = DraftModelConfig(model=str(draft), num_speculative_tokens=drafts, **(config or {}))
    return with_draft(resolved_for(target, traits=traits_for(speculative), speculative=speculative, **settings), draft)


def early(target: Path, exit_layer: int, drafts: int, **settings: object) -> ResolvedConfig:
    config = EarlyExitConfig(num_speculative_tokens=drafts, exit_layer=exit_layer)
    return resolved_for(target, traits=traits_for(config), speculative=config, **settings)


def all_greedy_drafts_kept(result: Run) -> bool:
    """Whether every draft of every greedy request came true, also those that the request's end cut."""
    greedy = [stats for name, stats in result.stats.items() if int(name[-1]) % 2 == 0]
    assert sum(stats.num_draft_tokens for stats in greedy) > 20
    return all(stats.num_verified_tokens == stats.num_draft_tokens for stats in greedy)


@pytest.mark.parametrize("drafts", [1, 3, 8, 16])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_draft_model_is_lossless(target_path: Path, draft_path: Path, scenario: Scenario, drafts: int) -> None:
    resolved = drafted(target_path, draft_path, drafts, **scenario.settings)
    result = check_lossless(target_path, scenario, traits=resolved.traits, build=lambda _: resolved)
    assert result.num_drafted() > 0


@pytest.mark.parametrize("drafts", [1, 3, 8])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_target_as_its_own_draft_is_always_right(target_path: Path, scenario: Scenario, drafts: int) -> None:
    resolved = drafted(target_path, target_path, drafts, **scenario.settings)
    result = check_lossless(target_path, scenario, traits=resolved.traits, build=lambda _: resolved)
    assert all_greedy_drafts_kept(result)


@pytest.mark.parametrize("drafts", [1, 3, 8, 16])
def test_its_mean_acceptance_length_is_k_plus_1(target_path: Path, drafts: int) -> None:
    requests = [request(f"a{i}", [i, 2, 3], max_tokens=1 + 4 * (drafts + 1)) for i in range(3)]
    result = run(drafted(target_path, target_path, drafts), requests)
    assert result.token_ids == plain(target_path, requests)
    assert result.acceptance_length() == drafts + 1
    assert [stats.num_steps for stats in result.stats.values()] == [5, 5, 5]


def test_drafting_that_stops_and_starts_again_leaves_no_hole(target_path: Path) -> None:
    """With three requests nobody drafts; as they end, the draft must know everything that was said meanwhile."""
    resolved = drafted(target_path, target_path, 4, config={"num_speculative_tokens_per_batch_size": ((1, 2, 4), (3, 8, 0))})
    requests = [request(f"s{2 * i}", [i, 2, 3], max_tokens=10 + 20 * i) for i in range(3)]
    result = run(resolved, requests)
    assert result.token_ids == plain(target_path, requests)
    assert all_greedy_drafts_kept(result)
    assert result.stats["s0"].num_drafts < result.stats["s4"].num_drafts


def test_a_request_that_wants_no_drafts_is_extended_for_those_that_share_its_prefix(target_path: Path) -> None:
    text = list(range(30))
    resolved = drafted(target_path, target_path, 3)
    quiet = request("q1", text, max_tokens=4, speculation=SpeculationParams(enabled=False))
    result = drive(resolved, [[quiet], [request("q2", text, max_tokens=30)]], None)
    assert result.num_cached_tokens["q2"] > 20
    assert result.stats["q1"].num_draft_tokens == 0
    assert all_greedy_drafts_kept(result)


def test_aborted_requests_leave_their_rows_to_others(target_path: Path) -> None:
    resolved = drafted(target_path, target_path, 3, max_num_seqs=2)
    running = start(resolved)
    running.add([request("gone1", [1, 2, 3], max_tokens=60), request("r2", [4, 5, 6], max_tokens=40)])
    for _ in range(3):
        running.step()
    running.core.abort("gone1")
    late = [request("r4", [7, 8, 9, 10], max_tokens=30), request("r6", [1, 2, 3, 4], max_tokens=30)]
    running.add(late)
    running.finish()
    del running.token_ids["gone1"]
    assert running.token_ids == plain(target_path, [request("r2", [4, 5, 6], max_tokens=40), *late])
    assert all_greedy_drafts_kept(running)


def test_drafting_ends_where_the_draft_does(target_path: Path, tmp_path: Path) -> None:
    """A draft with fewer positions, and one that is told to stop earlier; requests go on without it."""
    short = write_checkpoint(tmp_path, seed=1, max_positions=40)
    requests = [request(f"r{2 * i}", [i, 2, 3], max_tokens=80) for i in range(2)]
    for resolved, limit in ((drafted(target_path, short, 3), 40), (drafted(target_path, target_path, 3, config={"max_model_len": 25}), 25)):
        result = run(resolved, requests)
        assert result.token_ids == plain(target_path, requests)
        assert all_greedy_drafts_kept(result)
        assert result.stats["r0"].num_draft_tokens < limit
        assert result.stats["r0"].num_steps > 80 - limit


def test_weights_sleep_and_wake(target_path: Path) -> None:
    resolved = drafted(target_path, target_path, 3)
    proposer = build_proposer(resolved)
    assert isinstance(proposer, DraftModelProposer)
    need = proposer.memory()
    assert need.weights_bytes == proposer.model.num_bytes > 10_000
    assert need.kv_bytes_per_block == 2 * 2 * 4 * 2 * 8 * 4
    assert need.kv_layers == ((2, 8), (2, 8))
    proposer.sleep()
    assert proposer.model is None
    proposer.wake()
    proposer.reload()
    result = run(resolved, mixed_requests(), lambda _: proposer)
    assert all_greedy_drafts_kept(result)


@pytest.mark.parametrize("drafts", [1, 3, 8, 16])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_early_exit_is_lossless(deep_path: Path, scenario: Scenario, drafts: int) -> None:
    resolved = early(deep_path, 2, drafts, **scenario.settings)
    result = check_lossless(deep_path, scenario, traits=resolved.traits, build=lambda _: resolved)
    assert result.num_drafted() > 0


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_early_exit_after_the_last_layer_is_always_right(deep_path: Path, scenario: Scenario) -> None:
    """resolve() refuses such an exit, but it shows that drafting reads and writes the target's KV at the right places."""
    resolved = early(deep_path, 4, 5, **scenario.settings)
    result = check_lossless(deep_path, scenario, traits=resolved.traits, build=lambda _: resolved)
    assert all_greedy_drafts_kept(result)


def test_early_exit_refuses_what_it_cannot_do(deep_path: Path) -> None:
    resolved = early(deep_path, 2, 3)
    adapter = EarlyExitConfig(num_speculative_tokens=3, exit_layer=2, model="somewhere")
    with pytest.raises(ConfigError, match=r"speculative_config\.model is 'somewhere'"):
        EarlyExitProposer(replace(resolved, engine=replace(resolved.engine, speculative=adapter)))
    running = start(early(deep_path, 2, 3))
    proposer = running.runner.proposer
    assert isinstance(proposer, EarlyExitProposer)
    assert proposer.memory().weights_bytes == 0
    with pytest.raises(ConfigError, match="cannot run part of a NoneType"):
        proposer.bind(replace(proposer.rail, target=None))
