"""What verify found, for people and for programs: a verdict in words, tables, one JSON object.

Owns: wording and layout. Must not know: engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.tools.identity import Identity
from specdec.tools.verify import LawResult, VerifyReport

SHOWN_DIFFERENCES = 5


def verdict(report: VerifyReport) -> str:
    """Return the verdict in words."""
    num_tokens = sum(result.num_tokens for result in report.laws if result.engine == "speculative")
    tested = f"{report.accepted} of {report.drafted} drafts were accepted"
    if report.control_findings:
        return "UNDECIDED: plain decoding fails the test of law as well, so the fault is not (only) in speculation: " + "; ".join(
            report.control_findings
        )
    if report.findings:
        lossy = f" The rule `{report.rule.name}` is lossy by design." if report.rule.lossy else ""
        return f"BROKEN: speculation changes the output.{lossy} " + "; ".join(report.findings)
    if not report.drafted:
        return "NOTHING TESTED: no draft was made on these prompts, so the output is plain decoding's; give prompts on which drafts occur"
    words = f"NO DIFFERENCE FOUND: {num_tokens} tokens follow the target's law, {tested}, and a correct engine fails with probability"
    lossy = f" The rule `{report.rule.name}` is lossy all the same: a larger run would show it." if report.rule.lossy else ""
    return f"{words} {report.alpha:g} at most.{lossy}"


def as_mapping(report: VerifyReport, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything as a JSON object; `configuration` says what was run."""
    return {
        "verdict": verdict(report),
        "ok": report.ok and report.drafted > 0,
        "configuration": dict(configuration),
        **asdict(report),
    }


def show(report: VerifyReport, console: Console) -> None:
    """Print tables and verdict."""
    console.print(_identity_table(report))
    for found in report.identities:
        for difference in found.differences[:SHOWN_DIFFERENCES]:
            mark = "explained" if difference.explained else "NOT EXPLAINED"
            place = f"{found.kind}, prompt {difference.prompt_index}, token {difference.position}"
            tokens = f"{difference.plain_token} became {difference.drafted_token}"
            console.print(f"  {mark}: {place}: {tokens}; {difference.reason}", markup=False, highlight=False)
    console.print(_law_table(report))
    variation = report.variation
    console.print(
        f"total variation of short texts: {variation.observed:.4f}, plain against plain {variation.floor:.4f}, "
        f"permutation p {variation.permutation_p:.3f}",
        highlight=False,
    )
    console.print(verdict(report), style="bold green" if report.ok and report.drafted else "bold red", markup=False, highlight=False)


def _identity_table(report: VerifyReport) -> Table:
    table = Table(title="the same tokens, off and on", title_justify="left")
    for name in ("answers", "same", "differ by rounding", "differ"):
        table.add_column(name, justify="left" if name == "answers" else "right")
    for found in report.identities:
        table.add_row(*_identity_row(found))
    if not report.rule.exact_match:
        table.add_row("seeded", "-", "-", f"the rule `{report.rule.name}` draws other tokens by design")
    return table


def _identity_row(found: Identity) -> tuple[str, str, str, str]:
    explained = sum(difference.explained for difference in found.differences)
    return found.kind, f"{found.num_same} of {found.num}", str(explained), str(len(found.differences) - explained)


def _law_table(report: VerifyReport) -> Table:
    table = Table(title=f"the same law (p-values; all together, a correct engine fails with probability {report.alpha:g})")
    table.title_justify = "left"
    for name in ("law", "engine", "tokens", "bins", "largest gap", "surprise", "neighbours", "pairs", "lowest slot"):
        table.add_column(name, justify="left" if name in ("law", "engine") else "right")
    for result in report.laws:
        table.add_row(*_law_row(result))
    return table


def _law_row(result: LawResult) -> tuple[str, ...]:
    p_values = {check.name: check.p_value for check in result.checks}
    slots = [p for name, p in p_values.items() if name.startswith("slot ")]
    lowest = f"{min(slots):.2g} of {len(slots)}" if slots else "-"
    named = (f"{p_values[name]:.2g}" for name in ("bins", "largest gap", "surprise", "neighbours", "pairs"))
    return result.law, result.engine, str(result.num_tokens), *named, lowest
