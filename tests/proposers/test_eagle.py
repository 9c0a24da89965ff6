"""EAGLE heads in the engine: lossless, every draft equal to a plain reference's, and aligned as the papers say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specdec.config.engine import ResolvedConfig
from tests.models.eagle_reference import write_head
from tests.proposers.heads import EAGLE, EAGLE3, Recording, headed, plain_head
from tests.proposers.scenarios import SCENARIOS, Scenario, check_lossless

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
