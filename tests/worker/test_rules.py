"""Which requests a rule verifies together, the numbers it gets from its config, and what lossy rules do through the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.config.method_configs import DraftModelConfig, NgramConfig
from specdec.config.methods import traits_for
from specdec.engine.types import SpecDecodeRequestStats
from specdec.proposers.base import Dense, Sparse
from specdec.sampling_params import SamplingParams
from specdec.server.generation import Collected
from specdec.server.usage import response_metrics, usage
from specdec.worker.draft_laws import group_requests, join_laws
from specdec.worker.request_state import RowInfo
from specdec.worker.rules import VerifyRule, conditional_rates, verify_rule
from tests.proposers.tiny import Run, mixed_requests, plain, request, resolved_for, run, with_draft, write_checkpoint

MAP = torch.arange(5)


def row(index: int, *, law: Any = None, temperature: float = 1.0, parents: list[int] | None = None) -> RowInfo:
    return RowInfo(
        request_id=f"r{index}",
        row=index,
        num_prompt_tokens=1,
        prefill_len=1,
        num_tokens=1,
        num_computed=0,
        num_blocks=0,
        sampling=SamplingParams(temperature=temperature),
        tenant="",
        seed=0,
        track_drafts=False,
        parents=parents,
        law=law,
    )


def dense(width: int = 5, *, count: int = 2, id_map: torch.Tensor | None = None) -> Dense:
    return Dense(torch.randn(1, count, width), id_map)


def test_a_lossless_batch_is_split_by_law() -> None:
    infos = [
        row(0),
        row(1, law=dense()),
        row(2, law=dense(), temperature=0.0),
        row(3, law=dense(id_map=MAP)),
        row(4, law=Sparse(torch.zeros(1, 2, 3, dtype=torch.int64), torch.zeros(1, 2, 3))),
        row(5, law=dense()),
        row(6, law=dense(), parents=[-1, -1]),
        row(7, law=dense()),
        row(8, law=dense(id_map=MAP)),
    ]
    num_drafts = [2, 2, 2, 2, 2, 1, 2, 0, 1]
    groups = group_requests(infos, num_drafts, rule=VerifyRule())
    assert [(group.requests, group.by_match) for group in groups] == [
        ((0, 2, 6, 7), True),
        ((1, 5), False),
        ((3, 8), False),
        ((4,), False),
    ]
    assert [None if group.laws is None else len(group.laws) for group in groups] == [None, 2, 2, 1]


@pytest.mark.parametrize("name", ["synthetic", "typical"])
def test_rules_that_ignore_laws_take_all_chains_that_have_drafts(name: Any) -> None:
    infos = [row(0), row(1, law=dense()), row(2, temperature=0.0), row(3, parents=[-1]), row(4)]
    groups = group_requests(infos, [2, 2, 2, 1, 0], rule=VerifyRule(name=name, is_lossy=True))
    assert [(group.requests, group.by_match, group.laws) for group in groups] == [((0, 1, 2), False, None), ((3, 4), True, None)]


def test_laws_of_uneven_chains_are_joined() -> None:
    laws = (dense(count=3), dense(count=1))
    logits, ids = join_laws(laws, 2)
    assert logits is not None
    assert ids is None
    assert torch.equal(logits[0], laws[0].logits[0, :2])
    assert torch.equal(logits[1, :1], laws[1].logits[0])
    sparse = (
        Sparse(torch.tensor([[[4, 2]]]), torch.tensor([[[-0.5, -1.0]]])),
        Sparse(torch.tensor([[[1, 2, 3], [3, 2, 1]]]), torch.zeros(1, 2, 3)),
    )
    logprobs, ids = join_laws(sparse, 2)
    assert ids is not None
    assert logprobs is not None
    assert ids.tolist() == [[[4, 2, -1], [-1, -1, -1]], [[1, 2, 3], [3, 2, 1]]]
    assert logprobs[0, 0].tolist() == [-0.5, -1.0, -torch.inf]
    assert join_laws(None, 2) == (None, None)


def test_laws_of_one_pass_are_joined_without_a_copy() -> None:
    whole = torch.randn(4, 3, 7)
    laws = [Dense(whole[i : i + 1]) for i in range(4)]
    joined, _ = join_laws(laws[1:], 3)
    assert joined is not None
    assert torch.equal(joined, whole[1:])
    assert joined.data_ptr() == whole[1:].data_ptr()
    for chosen in ([0, 2], [2, 1], [1, 1]):
        logits, _ = join_laws([laws[i] for i in chosen], 2)
        assert logits is not None
        assert torch.equal(logits, whole[chosen][:, :2])


def config(**keys: Any) -> NgramConfig:
    return NgramConfig(num_speculative_tokens=4, **keys)


def test_synthetic_rates_are_conditional() -> None:
    rates = config(rejection_sample_method="synthetic", synthetic_acceptance_rates=(0.8, 0.4, 0.4, 0.0))
    assert conditional_rates(rates, 4) == pytest.approx((0.8, 0.5, 1.0, 0.0))
    length = config(rejection_sample_method="synthetic", synthetic_acceptance_length=3.25)
    assert conditional_rates(length, 4) == pytest.approx((1.0, 1.0, 0.25, 0.0))
    assert verify_rule(length, max_nodes=4).rates == pytest.approx((1.0, 1.0, 0.25, 0.0))


def test_a_rule_reads_its_config() -> None:
    assert verify_rule(None, max_nodes=0) == VerifyRule()
    assert verify_rule(config(rejection_sample_method="fly"), max_nodes=4).fly_window == 3
    fly = verify_rule(config(rejection_sample_method="fly", fly_window_size=2, fly_entropy_threshold=0.7, fly_entropy_top_k=5), max_nodes=4)
    assert (fly.fly_window, fly.fly_entropy_threshold, fly.fly_entropy_top_k, fly.is_lossy) == (2, 0.7, 5, True)
    typical = verify_rule(config(rejection_sample_method="typical", typical_acceptance_sampler_posterior_threshold=0.2), max_nodes=4)
    assert (typical.typical_epsilon, typical.typical_delta, typical.is_lossy) == (0.2, 0.3, True)
    assert not verify_rule(config(rejection_sample_method="block"), max_nodes=4).is_lossy


# ---------------------------------------------------------------- through the engine


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    return write_checkpoint(target, seed=0), write_checkpoint(draft, seed=1, num_layers=1)


def drafted(paths: tuple[Path, Path], rule: str, **keys: Any) -> Run:
    settings: dict[str, Any] = {"num_speculative_tokens": 4, "rejection_sample_method": rule} | keys
    speculative = DraftModelConfig(model=str(paths[1]), **settings)
    resolved = with_draft(resolved_for(paths[0], traits=traits_for(speculative), speculative=speculative), paths[1])
    return run(resolved, mixed_requests(8, max_tokens=60))


def is_marked(result: Run) -> set[bool]:
    return {stats.is_lossy for stats in result.stats.values()}


@pytest.mark.parametrize("method", ["greedy", "probabilistic", "coupled"])
def test_synthetic_acceptance_has_the_asked_length(paths: tuple[Path, Path], method: str) -> None:
    result = drafted(paths, "synthetic", synthetic_acceptance_length=3.0, draft_sample_method=method)
    assert 2.7 < result.acceptance_length() <= 3.0  # two drafts are sure; a request's end cuts some
    assert is_marked(result) == {True}


def test_typical_is_exact_for_greedy_requests_and_marked(paths: tuple[Path, Path]) -> None:
    result = drafted(paths, "typical")
    requests = mixed_requests(8, max_tokens=60)
    expected = plain(paths[0], requests)
    greedy = [r.request_id for r in requests if r.sampling.is_greedy]
    assert {name: result.token_ids[name] for name in greedy} == {name: expected[name] for name in greedy}
    assert is_marked(result) == {True}


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_fly_keeps_more_than_the_standard_rule(paths: tuple[Path, Path], method: str) -> None:
    keys = {"draft_sample_method": method}
    standard = drafted(paths, "standard", **keys)
    fly = drafted(paths, "fly", fly_window_size=1, fly_entropy_threshold=0.0, **keys)
    closed = drafted(paths, "fly", fly_window_size=1, fly_entropy_threshold=99.0, **keys)
    assert fly.acceptance_length() > standard.acceptance_length()
    assert is_marked(fly) == {True}
    assert is_marked(standard) == {False}
    greedy = [name for name in closed.token_ids if int(name[1:]) % 2 == 0]
    assert [closed.token_ids[name] for name in greedy] == [standard.token_ids[name] for name in greedy]  # nobody is undecided enough


def test_requests_without_drafts_are_not_marked(paths: tuple[Path, Path]) -> None:
    from specdec.sampling_params import SpeculationParams

    speculative = DraftModelConfig(model=str(paths[1]), num_speculative_tokens=3, rejection_sample_method="typical")
    resolved = with_draft(resolved_for(paths[0], traits=traits_for(speculative), speculative=speculative), paths[1])
    quiet = request("quiet", [1, 2, 3], temperature=0.8, speculation=SpeculationParams(enabled=False))
    result = run(resolved, [quiet, request("loud", [1, 2, 3], temperature=0.8)])
    assert {name: stats.is_lossy for name, stats in result.stats.items()} == {"quiet": False, "loud": True}
    assert result.token_ids["quiet"] == plain(paths[0], [quiet])["quiet"]


def test_answers_say_that_they_are_lossy() -> None:
    exact, lossy = (Collected(stats=SpecDecodeRequestStats(is_lossy=mark)) for mark in (False, True))
    counts = {"num_prompt_tokens": 1, "num_completion_tokens": 2, "num_cached_tokens": 0}
    assert usage(**counts, choices=[exact, lossy])["lossy"] is True
    assert "lossy" not in usage(**counts, choices=[exact])
    for choice in (exact, lossy):
        metrics = response_metrics([choice], "summary", max_nodes=4)
        assert metrics is not None
        assert metrics["speculative_decoding"]["lossy"] is choice.stats.is_lossy  # type: ignore[union-attr]
