"""Sampled drafts through the whole engine: the text follows the target's law under p/q and block, and known mistakes are seen.

Each test generates a few thousand tokens with fixed seeds, so it always gives the same numbers; an exact engine fails one of them
with probability below 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import DraftModelConfig, EarlyExitConfig
from specdec.config.methods import traits_for
from specdec.engine.types import EngineRequest
from specdec.kernels import torch_chains
from specdec.proposers import draft_sampling
from specdec.proposers.base import Proposer
from specdec.worker import draft_laws, rules, sampler
from tests.law.law_proposers import RandomLawProposer
from tests.law.scoring import Verdict, judge
from tests.proposers.tiny import Run, plain, prompts, request, resolved_for, run, with_draft, write_checkpoint

RULES = ["standard", "block"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("other"), seed=1, num_layers=1)


@pytest.fixture(scope="module")
def near(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise on its weights: most drafts are kept, none is sure."""
    path = tmp_path_factory.mktemp("near")
    model = LlamaForCausalLM.from_pretrained(target)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(path)
    return path


def sampled_requests(count: int = 40, *, max_tokens: int = 70, **sampling: Any) -> list[EngineRequest]:
    """Seeded requests at temperature 0.8 (or as given) over short random prompts."""
    sampling = {"temperature": 0.8} | sampling
    texts = prompts(count, seed=3, longest=12)
    return [request(f"p{i}", text, max_tokens=max_tokens, **sampling | {"seed": 1000 + i}) for i, text in enumerate(texts)]


def with_rule(resolved: ResolvedConfig, rule: str) -> ResolvedConfig:
    """A rule beside a proposer that a test brings along: only the rule of this config is read."""
    config = EarlyExitConfig(num_speculative_tokens=3, exit_layer=1, rejection_sample_method=rule)  # type: ignore[arg-type]
    return replace(resolved, engine=replace(resolved.engine, speculative=config))


def random_law_run(target: Path, rule: str, requests: list[EngineRequest], make: Callable[[ResolvedConfig], Proposer]) -> Run:
    return run(with_rule(resolved_for(target, traits=make(None).traits, max_num_seqs=16), rule), requests, make)  # type: ignore[arg-type]


def drafted(target: Path, draft: Path, rule: str, method: str, **settings: Any) -> ResolvedConfig:
    config = DraftModelConfig(
        model=str(draft),
        num_speculative_tokens=3,
        rejection_sample_method=rule,
        draft_sample_method=method,  # type: ignore[arg-type]
    )
    return with_draft(resolved_for(target, traits=traits_for(config), speculative=config, max_num_seqs=16, **settings), draft)


def verdict(target: Path, requests: list[EngineRequest], result: Run) -> Verdict:
    return judge(target, requests, result.token_ids)


def test_plain_decoding_follows_the_law_and_the_test_sees_another_temperature(target: Path) -> None:
    requests = sampled_requests()
    ids = plain(target, requests)
    assert judge(target, requests, ids).is_lawful
    warmer = [replace(r, sampling=replace(r.sampling, temperature=0.9)) for r in requests]
    assert not judge(target, warmer, ids).is_lawful


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", ["dense", "mapped", "sparse"])
def test_made_up_laws_in_mixed_batches(target: Path, rule: str, layout: str) -> None:
    sampling = {"top_p": 0.9, "top_k": 60, "presence_penalty": 0.5} if layout == "mapped" else {}
    requests = sampled_requests(**sampling)
    result = random_law_run(target, rule, requests, lambda _: RandomLawProposer(layout))
    assert verdict(target, requests, result).is_lawful
    assert 0 < result.num_accepted() < result.num_drafted()


@pytest.mark.parametrize("rule", RULES)
def test_greedy_requests_beside_sampled_ones_are_exact(target: Path, rule: str) -> None:
    requests = [replace(r, sampling=replace(r.sampling, temperature=0.8 * (i % 2))) for i, r in enumerate(sampled_requests(16))]
    result = random_law_run(target, rule, requests, lambda _: RandomLawProposer("dense"))
    expected = plain(target, requests[::2])
    assert {name: result.token_ids[name] for name in expected} == expected


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_model_draws_drafts(target: Path, other: Path, rule: str) -> None:
    requests = sampled_requests(30)
    wrong = run(drafted(target, other, rule, "probabilistic"), requests)
    assert verdict(target, requests, wrong).is_lawful
    right = run(drafted(target, target, rule, "probabilistic"), requests)
    assert verdict(target, requests, right).is_lawful
    verified = sum(stats.num_verified_tokens for stats in right.stats.values())
    assert verified >= 0.999 * right.num_drafted()  # equal laws: every coin is won, up to rounding
    assert wrong.num_accepted() < right.num_accepted()


def test_preempted_requests_keep_the_law(target: Path, other: Path) -> None:
    requests = sampled_requests(24, max_tokens=60)
    result = run(drafted(target, other, "block", "probabilistic", num_blocks=60), requests)
    assert result.num_preemptions > 0
    assert verdict(target, requests, result).is_lawful


def test_block_keeps_more_than_the_standard_rule(target: Path, other: Path) -> None:
    requests = sampled_requests(30)
    standard, block = (run(drafted(target, other, rule, "probabilistic"), requests) for rule in RULES)
    assert block.num_accepted() / block.num_drafted() > standard.num_accepted() / standard.num_drafted()


def test_coupled_drafts_leave_seeded_output_alone(target: Path, other: Path) -> None:
    requests = sampled_requests(16, top_p=0.9)
    expected = plain(target, requests)
    right, wrong = (run(drafted(target, draft, "standard", "coupled"), requests) for draft in (target, other))
    assert right.token_ids == wrong.token_ids == expected
    assert sum(stats.num_verified_tokens for stats in right.stats.values()) == right.num_drafted()
    assert wrong.num_accepted() < wrong.num_drafted()


# ---------------------------------------------------------------- mistakes: each must be seen


def _residual_from_p(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_chains._Laws, "subtract", lambda self, mass, *_: mass)


def _law_at_another_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    join = draft_laws.join_laws

    def warmer(laws: Any, num_drafts: int) -> Any:
        logits, ids = join(laws, num_drafts)
        return (None if logits is None else logits * 0.7), ids

    monkeypatch.setattr(sampler, "join_laws", warmer)


def _sampled_draft_judged_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coin asks p(d) though the residual takes q off."""
    init = torch_chains._Laws.__init__

    def certain(self: Any, *args: Any) -> None:
        init(self, *args)
        self.q = torch.ones_like(self.q)

    monkeypatch.setattr(torch_chains._Laws, "__init__", certain)


def _argmax_judged_by_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = draft_sampling.draw_drafts

    def argmax(*args: Any, **kwargs: Any) -> draft_sampling.DrawnDrafts:
        drawn = draw(*args, **kwargs)
        return drawn._replace(ids=drawn.logits.argmax(-1))

    monkeypatch.setattr(draft_sampling, "draw_drafts", argmax)


def _cut_after_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    law = rules.Part.target_law

    def uncut(self: rules.Part) -> torch.Tensor:
        return law(replace(self, cuts=self.cuts | {"top_p": torch.ones_like(self.cuts["top_p"])}))

    monkeypatch.setattr(rules.Part, "target_law", uncut)


def _bonus_row_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recover = torch_chains._recover

    def early(target_probs: Any, laws: Any, chain: Any, kept: int, weight: float, u: float) -> int:
        row = kept - 1 if kept == len(chain.drafts) > 0 else kept
        return recover(target_probs, laws, chain, row, weight, u) if row == kept else torch_chains._draw(target_probs[chain.start + row], u)

    monkeypatch.setattr(torch_chains, "_recover", early)


MISTAKES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = {
    "residual drawn from p": (_residual_from_p, {}),
    "q scored at another temperature": (_law_at_another_temperature, {}),
    "sampled draft judged by p alone": (_sampled_draft_judged_alone, {}),
    "argmax draft judged by its softmax": (_argmax_judged_by_softmax, {}),
    "top-p after the test": (_cut_after_the_test, {"top_p": 0.8}),
    "bonus row off by one": (_bonus_row_off_by_one, {}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_known_mistake_is_seen(target: Path, near: Path, other: Path, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes of keeping show with a good drafter, mistakes of refusing with a bad one."""
    apply, sampling = MISTAKES[mistake]
    draft = other if mistake == "residual drawn from p" else near
    requests = sampled_requests(**sampling)
    apply(monkeypatch)
    assert not verdict(target, requests, run(drafted(target, draft, "standard", "probabilistic"), requests)).is_lawful


def test_without_a_mistake_the_same_runs_are_lawful(target: Path, near: Path) -> None:
    for sampling in ({}, {"top_p": 0.8}):
        requests = sampled_requests(**sampling)
        result = run(drafted(target, near, "standard", "probabilistic"), requests)
        assert verdict(target, requests, result).is_lawful
        assert result.num_accepted() > 0.3 * result.num_drafted()


def test_a_sampled_draft_judged_as_certain_is_exact(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a mistake: without its law a drawn draft is verified by exact match, which is lossless and only slower."""
    from specdec.worker import request_state

    monkeypatch.setattr(request_state, "_law_of", lambda drafts, index: None)
    requests = sampled_requests()
    result = random_law_run(target, "standard", requests, lambda _: RandomLawProposer("dense"))
    assert result.token_ids == plain(target, requests)
