"""What every draft method must survive, each with a check that it really happened: the ids must equal plain decoding's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.config.engine import ResolvedConfig
from specdec.config.methods import MethodTraits
from specdec.engine.types import EngineRequest
from tests.proposers.tiny import MakeProposer, Run, mixed_requests, plain, prompts, request, resolved_for, start

Build = Callable[[ResolvedConfig], ResolvedConfig]


def _as_it_is(resolved: ResolvedConfig) -> ResolvedConfig:
    return resolved


def _nothing(result: Run) -> None:
    assert result.num_preemptions == 0


def _preempted(result: Run) -> None:
    assert result.num_preemptions > 0, "the cache was large enough, so nothing was preempted"


def _hit(result: Run) -> None:
    assert sum(result.num_cached_tokens.values()) > 20, f"prefix hits: {result.num_cached_tokens}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """Engine settings, the requests of each wave (a wave starts when the one before it has ended or been joined), and a check."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    check: Callable[[Run], None] = _nothing
    waves: int = 1
    steps_between: int | None = None  # None: a wave starts when the one before has ended

    def requests(self) -> list[list[EngineRequest]]:
        """Requests by wave, greedy and seeded by turns; later waves repeat the prompts of the first with another end."""
        if self.waves == 1:
            return [mixed_requests()]
        texts = prompts(4, seed=3, shortest=18)
        return [
            [
                request(f"w{wave}-{i}", [*text[: len(text) - 3 * wave], wave], temperature=0.8 * (i % 2), max_tokens=16 + i)
                for i, text in enumerate(texts)
            ]
            for wave in range(self.waves)
        ]


SCENARIOS = (
    Scenario("roomy"),
    Scenario("chunked", {"max_num_batched_tokens": 24}),
    Scenario("preempting", {"num_blocks": 23}, _preempted),
    Scenario("prefix_hits", {}, _hit, waves=2),
    Scenario("joining", {"max_num_batched_tokens": 24}, _hit, waves=3, steps_between=6),
    Scenario("overlapped", {"async_scheduling": True}),
    Scenario("overlapped_preempting", {"async_scheduling": True, "num_blocks": 23}, _preempted),
)


def drive(
    resolved: ResolvedConfig, waves: Sequence[Sequence[EngineRequest]], make: MakeProposer | None, *, steps_between: int | None = None
) -> Run:
    """Run the waves through one engine."""
    running = start(resolved, make)
    for wave in waves:
        running.add(wave)
        num_steps = 0
        while running.core.has_work and num_steps != steps_between:
            running.step()
            num_steps += 1
    return running.finish()


def check_lossless(
    path: Path, scenario: Scenario, *, traits: MethodTraits, make: MakeProposer | None = None, build: Build = _as_it_is
) -> Run:
    """Assert that a scenario under a method emits what plain decoding emits; return what happened. `build` amends the configuration."""
    waves = scenario.requests()
    resolved = build(resolved_for(path, traits=traits, **scenario.settings))
    result = drive(resolved, waves, make, steps_between=scenario.steps_between)
    assert result.token_ids == truth(path, scenario)
    assert set(result.reasons.values()) == {"length"}
    scenario.check(result)
    return result


def truth(path: Path, scenario: Scenario) -> dict[str, list[int]]:
    """What plain decoding emits in a scenario, for drafters that know it."""
    return plain(path, [one for wave in scenario.requests() for one in wave])
