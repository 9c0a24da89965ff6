"""The start-up report, and the golden file that guards every default."""

from __future__ import annotations

from pathlib import Path

from specdec.config.engine import EMBEDDED_MODEL, EngineConfig, ReportRow
from specdec.config.report import asked_rows, default_rows, render, speculative_rows
from specdec.config.resolve import default_speculative
from specdec.config.speculative import MODELS

GOLDEN = Path(__file__).with_name("golden_defaults.txt")


def all_defaults() -> str:
    lines = [f"{row.name} = {_plain(row.value)}" for row in default_rows(MODELS)]
    lines += [f"without any config: {row.name} = {_plain(row.value)}" for row in speculative_rows(default_speculative())]
    for source in getattr(default_speculative(EMBEDDED_MODEL), "sources"):  # noqa: B009 (only a hybrid has them)
        lines += [f"embedded model: {source.method}.{name} = {value}" for name, value in source.model_dump(exclude_defaults=True).items()]
    return "\n".join(lines) + "\n"


def _plain(value: object) -> str:
    return "none" if value is None else str(value)


def test_defaults_change_only_on_purpose() -> None:
    """A default that changes moves users' results: edit golden_defaults.txt together with the changelog."""
    assert all_defaults() == GOLDEN.read_text(encoding="utf-8")


def test_rows_are_aligned_and_name_their_source() -> None:
    rows = [
        ReportRow(name="a", value=None, source="default"),
        ReportRow(name="long.name", value=True, source="user"),
        ReportRow(name="t", value=(1, "x"), source="derived"),
    ]
    assert render(rows).splitlines() == ["a          -       [default]", "long.name  yes     [user]", "t          [1, x]  [derived]"]
    assert render([]) == ""


def test_every_option_of_the_engine_has_a_row() -> None:
    names = {row.name for row in asked_rows(EngineConfig())}
    assert {"device", "model.dtype", "cache.block_size", "scheduler.max_num_seqs"} <= names
    assert all(row.source == "default" for row in asked_rows(EngineConfig()))
