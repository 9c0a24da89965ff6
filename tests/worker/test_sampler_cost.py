"""What a request does not ask for is not done: no noise for greedy batches, no processors, laws or copies for plain requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.config.method_configs import NgramConfig
from specdec.config.methods import traits_for
from specdec.kernels import dispatch
from specdec.worker import rules, sampler
from tests.proposers.tiny import Run, request, resolved_for, run, write_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that sampler and rules asked for, and of what else costs."""
    names: list[str] = []

    def spying(name: str, device: Any) -> Callable[..., Any]:
        names.append(name)
        return dispatch.kernel(name, device)

    monkeypatch.setattr(sampler, "kernel", spying)
    monkeypatch.setattr(rules, "kernel", spying)
    process = sampler.process_block
    monkeypatch.setattr(sampler, "process_block", lambda *args, **kwargs: names.append("process_block") or process(*args, **kwargs))
    return names


def generate(path: Path, *, rule: str = "standard", **sampling: Any) -> Run:
    config = NgramConfig(
        num_speculative_tokens=3,
        prompt_lookup_min=1,
        prompt_lookup_max=2,
        rejection_sample_method=rule,  # type: ignore[arg-type]
    )
    result = run(resolved_for(path, traits=traits_for(config), speculative=config), [request("r1", [5, 6, 5, 6, 5], **sampling)])
    assert result.num_drafted() > 0
    return result


def test_greedy_requests_draw_no_noise_and_build_no_law(path: Path, used: list[str]) -> None:
    generate(path)
    assert set(used) == {"sample_logits", "verify_coupled"}


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_certain_drafts_are_matched_without_a_law(path: Path, used: list[str], rule: str) -> None:
    generate(path, rule=rule, temperature=0.8, top_p=0.9)
    assert set(used) == {"uniform", "sample_logits", "verify_coupled"}


def test_processors_run_for_those_who_ask(path: Path, used: list[str]) -> None:
    generate(path, presence_penalty=0.5)
    assert "process_block" in used


@pytest.mark.parametrize(("rule", "kernel"), [("fly", "fly"), ("typical", "typical")])
def test_a_lossy_rule_is_the_configured_kernel(path: Path, used: list[str], rule: str, kernel: str) -> None:
    generate(path, rule=rule, temperature=0.8)
    assert {"target_law", kernel} <= set(used)
