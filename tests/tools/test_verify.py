"""verify on a tiny random model: correct engines pass, and every known way to lose the law is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from specdec.kernels import dispatch
from specdec.proposers.base import BaseProposer
from specdec.tools.verify import RuleFacts, VerifyReport
from specdec.tools.verify_report import verdict
from tests.proposers.tiny import write_checkpoint
from tests.tools import verify_mutations as mutations
from tests.tools.verify_cases import (
    BLOCK,
    CHANGING_ROWS,
    EXACT,
    FLAT_AND_SHARP,
    NEAR_AND_FAR,
    ONE_LAW,
    STANDARD,
    Dial,
    Fault,
    MarkovProposer,
    TreeProposer,
    larger,
    run,
    write_dial_target,
)
from tests.tools.verify_mutations import Mutation

SMALL = larger(400, length=24, tv_samples=20)
MakeTarget = Callable[[Dial], Path]


@pytest.fixture(scope="module")
def random_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """97 tokens and real attention, for faults of positions and caches."""
    return write_checkpoint(tmp_path_factory.mktemp("random"), seed=3)


@pytest.fixture(scope="module")
def target_of(tmp_path_factory: pytest.TempPathFactory) -> MakeTarget:
    """Three or four tokens and a law that is known, for faults of rules."""
    return lambda dial: write_dial_target(tmp_path_factory.mktemp("dial"), dial)


@pytest.fixture
def _kernels_as_before() -> Iterator[None]:
    """Mutations change which kernel is served; what they loaded must not outlive them."""
    yield
    dispatch.load.cache_clear()


def none(patch: pytest.MonkeyPatch) -> None:
    """No mutation of the engine; the drafter may have a fault of its own."""


def check_passes(report: VerifyReport) -> None:
    assert report.ok, verdict(report)
    assert 0 < report.accepted < report.drafted
    assert verdict(report).startswith("NO DIFFERENCE FOUND")


def check_broken(report: VerifyReport, *words: str) -> None:
    """It is reported, plain decoding is not blamed, and one of the words names what found it."""
    assert not report.ok
    assert report.control_findings == ()
    assert verdict(report).startswith("BROKEN")
    assert any(word in finding for finding in report.findings for word in words), report.findings


@pytest.mark.law
@pytest.mark.parametrize("rule", [STANDARD, BLOCK], ids=["standard", "block"])
def test_a_correct_rule_passes(target_of: MakeTarget, rule: RuleFacts) -> None:
    path = target_of(NEAR_AND_FAR)
    report = run(path, lambda: MarkovProposer(dial=NEAR_AND_FAR), rule=rule, config_rule=rule.name)
    check_passes(report)
    by_slot = [check.name for result in report.laws for check in result.checks if check.name.startswith("slot")]
    assert bool(by_slot) == rule.by_slot
    assert [found.kind for found in report.identities] == ["greedy"]


@pytest.mark.law
@pytest.mark.parametrize("proposer", [lambda: MarkovProposer("hidden_law"), TreeProposer], ids=["chain", "tree"])
def test_certain_drafts_give_the_same_tokens(random_target: Path, proposer: Callable[[], BaseProposer]) -> None:
    """A drawn draft may be verified as a certain one: that is exact, it only accepts less."""
    report = run(random_target, proposer, rule=EXACT, options=SMALL)
    check_passes(report)
    assert [found.kind for found in report.identities] == ["greedy", "seeded"]
    assert all(found.num_same == found.num for found in report.identities)


class Case(NamedTuple):
    """A mutation of the engine or a fault of the drafter, the rule and target it acts on, and how many tokens tell."""

    mutation: Mutation
    rule: RuleFacts
    tokens: int
    fault: Fault = "none"
    dial: Dial = NEAR_AND_FAR


LAW_CASES = {
    "residual_from_target": Case(mutations.residual_from_target, STANDARD, 1600),
    "drawn_draft_judged_as_certain": Case(mutations.drawn_draft_judged_as_certain, STANDARD, 800),
    "argmax_with_softmax_law": Case(none, STANDARD, 800, "argmax_with_softmax_law"),
    "kept_when_likely": Case(none, STANDARD, 1600, "kept_when_likely"),
    "bonus_row_off_by_one": Case(mutations.bonus_row_off_by_one, STANDARD, 1600, dial=CHANGING_ROWS),
    "cuts_after_the_test": Case(mutations.cuts_after_the_test, STANDARD, 800),
    "block_sum_over_the_row_before": Case(mutations.block_sum_over_the_row_before, BLOCK, 1600, dial=CHANGING_ROWS),
    "block_last_coin_by_formula": Case(mutations.block_last_coin_by_formula, BLOCK, 1600),
}
FINE_CASES = {
    "law_of_other_temperature": Case(none, STANDARD, 4000, "law_of_other_temperature", FLAT_AND_SHARP),
    "coin_is_the_uniform_that_drew_the_draft": Case(mutations.coin_is_the_uniform_that_drew_the_draft, STANDARD, 6000),
    "block_noise_by_position": Case(none, BLOCK, 24000, "noise_by_position", ONE_LAW),
}


def report_of(case: Case, target_of: MakeTarget, monkeypatch: pytest.MonkeyPatch) -> VerifyReport:
    case.mutation(monkeypatch)
    return run(
        target_of(case.dial), lambda: MarkovProposer(case.fault, dial=case.dial),
        rule=case.rule, config_rule=case.rule.name, options=larger(case.tokens),
    )  # fmt: skip


@pytest.mark.law
@pytest.mark.usefixtures("_kernels_as_before")
@pytest.mark.parametrize("name", LAW_CASES)
def test_mutations_of_the_law_are_caught(target_of: MakeTarget, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check_broken(report_of(LAW_CASES[name], target_of, monkeypatch), "temperature", "penalties", "total variation")


@pytest.mark.law
@pytest.mark.slow
@pytest.mark.usefixtures("_kernels_as_before")
@pytest.mark.parametrize("name", FINE_CASES)
def test_fine_mutations_of_the_law_are_caught(target_of: MakeTarget, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check_broken(report_of(FINE_CASES[name], target_of, monkeypatch), "temperature", "penalties", "total variation")


def test_penalties_that_ignore_the_drafts_before_a_row_are_caught(target_of: MakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    mutations.penalties_not_advanced_along_drafts(monkeypatch)
    report = run(target_of(NEAR_AND_FAR), lambda: TreeProposer(dial=NEAR_AND_FAR), rule=EXACT, options=SMALL)
    check_broken(report, "seeded answers")
    assert report.identities[0].holds, "greedy answers know no penalties here"


IDENTITY_CASES: dict[str, tuple[Mutation, Callable[[], BaseProposer]]] = {
    "stale_kv_of_a_refused_draft": (mutations.stale_kv_of_a_refused_draft, lambda: MarkovProposer("hidden_law")),
    "wrong_position_after_rollback": (mutations.wrong_position_after_rollback, lambda: MarkovProposer("hidden_law")),
    "fresh_draw_after_a_refused_chain": (mutations.fresh_draw_after_refused_drafts, lambda: MarkovProposer("hidden_law")),
    "fresh_draw_after_refused_siblings": (mutations.fresh_draw_after_refused_drafts, TreeProposer),
}


@pytest.mark.parametrize("name", IDENTITY_CASES)
def test_mutations_of_the_tokens_are_caught(random_target: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutation, proposer = IDENTITY_CASES[name]
    mutation(monkeypatch)
    report = run(random_target, proposer, rule=EXACT, options=SMALL)
    check_broken(report, "greedy answers", "seeded answers")
    unexplained = [difference for found in report.identities for difference in found.differences if not difference.explained]
    assert all("more than rounding in float32 explains" in difference.reason for difference in unexplained)
