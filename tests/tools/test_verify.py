"""verify on a tiny random model: correct engines pass, and every known way to lose the law is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.kernels import dispatch
from specdec.proposers.base import BaseProposer
from specdec.tools.verify import RuleFacts, VerifyOptions, VerifyReport
from specdec.tools.verify_report import verdict
from tests.engine.tokenizers_for_tests import toy_tokenizer
from tests.proposers.tiny import write_checkpoint
from tests.tools import verify_mutations as mutations
from tests.tools.verify_cases import BLOCK, EXACT, STANDARD, MarkovProposer, TreeProposer, larger, run, write_repeating_checkpoint
from tests.tools.verify_mutations import Mutation

SMALL = larger(400, length=24, tv_samples=20)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint(tmp_path_factory.mktemp("target"), seed=3)
    toy_tokenizer().hf.save_pretrained(path)
    return path


@pytest.fixture
def _kernels_as_before() -> Iterator[None]:
    """Mutations change which kernel is served; what they loaded must not outlive them."""
    yield
    dispatch.load.cache_clear()


def make(fault: Any = "none") -> Callable[[], BaseProposer]:
    return lambda: MarkovProposer(fault)


def none(patch: pytest.MonkeyPatch) -> None:
    """No mutation."""


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
@pytest.mark.parametrize(("rule", "name"), [(STANDARD, "standard"), (BLOCK, "block")])
def test_a_correct_rule_passes(target: Path, rule: RuleFacts, name: str) -> None:
    report = run(target, make(), rule=rule, config_rule=name)
    check_passes(report)
    by_slot = [check.name for result in report.laws for check in result.checks if check.name.startswith("slot")]
    assert bool(by_slot) == (name == "standard")
    assert [found.kind for found in report.identities] == ["greedy"]


@pytest.mark.law
@pytest.mark.parametrize("proposer", [lambda: MarkovProposer("hidden_law"), TreeProposer], ids=["chain", "tree"])
def test_certain_drafts_give_the_same_tokens(target: Path, proposer: Callable[[], BaseProposer]) -> None:
    """A drawn draft may be verified as a certain one: that is exact, it only accepts less."""
    report = run(target, proposer, rule=EXACT, options=larger(800))
    check_passes(report)
    assert [found.kind for found in report.identities] == ["greedy", "seeded"]
    assert all(found.num_same == found.num for found in report.identities)


LAW_CASES: dict[str, tuple[Mutation, Any, RuleFacts, VerifyOptions]] = {
    "residual_from_target": (mutations.residual_from_target, "none", STANDARD, larger(1600)),
    "drawn_draft_judged_as_certain": (mutations.drawn_draft_judged_as_certain, "none", STANDARD, larger(800)),
    "argmax_with_softmax_law": (none, "argmax_with_softmax_law", STANDARD, larger(800)),
    "law_of_other_temperature": (none, "law_of_other_temperature", STANDARD, larger(2400, temperature=0.8)),
    "kept_when_likely": (none, "kept_when_likely", STANDARD, larger(2400)),
    "bonus_row_off_by_one": (mutations.bonus_row_off_by_one, "none", STANDARD, larger(1600, temperature=3.0)),
    "cuts_after_the_test": (mutations.cuts_after_the_test, "none", STANDARD, larger(800)),
    "block_last_coin_by_formula": (mutations.block_last_coin_by_formula, "none", BLOCK, larger(1600, temperature=3.0)),
}


@pytest.mark.law
@pytest.mark.usefixtures("_kernels_as_before")
@pytest.mark.parametrize("name", LAW_CASES)
def test_mutations_of_the_law_are_caught(target: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutation, fault, rule, options = LAW_CASES[name]
    mutation(monkeypatch)
    report = run(target, make(fault), rule=rule, config_rule=rule.name, options=options)
    check_broken(report, "temperature", "penalties", "total variation")


@pytest.mark.law
def test_penalties_that_ignore_the_drafts_before_a_row_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a target that repeats itself, or the penalty of a token in the same block would hardly matter."""
    path = write_repeating_checkpoint(tmp_path)
    mutations.penalties_not_advanced_along_drafts(monkeypatch)
    report = run(path, make(), rule=STANDARD, options=larger(1200, temperature=1.0))
    check_broken(report, "penalties")
    assert not any(finding.startswith("temperature") for finding in report.findings), "the law without penalties is kept"


IDENTITY_CASES: dict[str, tuple[Mutation, Callable[[], BaseProposer]]] = {
    "stale_kv_of_a_refused_draft": (mutations.stale_kv_of_a_refused_draft, make("hidden_law")),
    "wrong_position_after_rollback": (mutations.wrong_position_after_rollback, make("hidden_law")),
    "fresh_draw_after_a_refused_chain": (mutations.fresh_draw_after_refused_drafts, make("hidden_law")),
    "fresh_draw_after_refused_siblings": (mutations.fresh_draw_after_refused_drafts, TreeProposer),
}


@pytest.mark.parametrize("name", IDENTITY_CASES)
def test_mutations_of_the_tokens_are_caught(target: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutation, proposer = IDENTITY_CASES[name]
    mutation(monkeypatch)
    report = run(target, proposer, rule=EXACT, options=SMALL)
    check_broken(report, "greedy answers", "seeded answers")
    unexplained = [difference for found in report.identities for difference in found.differences if not difference.explained]
    assert all("more than rounding in float32 explains" in difference.reason for difference in unexplained)


def test_a_fresh_draw_without_leaving_out_the_refused_siblings_bends_the_law(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens tell first; here the law alone has to."""
    mutations.fresh_draw_after_refused_drafts(monkeypatch)
    report = run(target, TreeProposer, rule=STANDARD, options=larger(2400, temperature=0.8))
    check_broken(report, "temperature 0.8", "total variation")
