"""The start-up report: every resolved value and where it came from.

Owns: rows and their text. Must not know: how values were resolved. The rows of all defaults are frozen in a golden file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, cast

from pydantic.fields import FieldInfo

from specdec.config.engine import CacheConfig, EngineConfig, ExecutionConfig, ModelConfig, ReportRow, SchedulerConfig
from specdec.config.fields import SpeculativeBase, idle_fields

Source = Literal["user", "checkpoint", "default", "derived"]
SECTIONS: dict[str, type] = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "execution": ExecutionConfig}


def asked_rows(engine: EngineConfig, sources: Mapping[str, str] | None = None) -> list[ReportRow]:
    """Return one row per option of the engine, speculation apart. Names are `section.option`.

    sources: option name -> source, where the caller knows better than "differs from the default, so the user said it".
    """
    rows = [_row("device", engine.device, "auto", sources)]
    for section, kind in SECTIONS.items():
        part = getattr(engine, section)
        rows += [_row(f"{section}.{field.name}", getattr(part, field.name), field.default, sources) for field in fields(kind)]
    return rows


def speculative_rows(config: SpeculativeBase | None, sources: Mapping[str, str] | None = None) -> list[ReportRow]:
    """Return one row per key of the speculative config that was decided; a single `off` row without one."""
    if config is None:
        return [ReportRow(name="speculative", value="off", source=_source("speculative", sources, "user"))]
    general = _source("speculative", sources, "user")
    idle = idle_fields(config.rejection_sample_method)
    rows = []
    for name in type(config).model_fields:
        origin = general if name in config.model_fields_set or name == "method" else "default"
        value = getattr(config, name)
        if value is not None and name not in idle:
            rows.append(ReportRow(name=f"speculative.{name}", value=value, source=_source(f"speculative.{name}", sources, origin)))
    return rows


def default_rows(models: Mapping[str, type[SpeculativeBase]]) -> list[ReportRow]:
    """Return the default of every option there is; required keys read `(required)`.

    Keys common to all methods come once, as `speculative.key`; what a method adds or changes as `speculative[method].key`.
    """
    common = {name: _default(field) for name, field in SpeculativeBase.model_fields.items() if name != "method"}
    defaults = {f"speculative.{name}": value for name, value in common.items()}
    for method, model in models.items():
        own = {name: _default(field) for name, field in model.model_fields.items() if name != "method"}
        defaults |= {f"speculative[{method}].{name}": value for name, value in own.items() if name not in common or common[name] != value}
    return asked_rows(EngineConfig()) + [ReportRow(name=name, value=value, source="default") for name, value in defaults.items()]


def render(rows: Iterable[ReportRow]) -> str:
    """Return the rows as aligned lines: name, value, source in brackets."""
    shown = [(row.name, _text(row.value), row.source) for row in rows]
    name_width = max((len(name) for name, _, _ in shown), default=0)
    value_width = min(max((len(value) for _, value, _ in shown), default=0), 40)
    return "\n".join(f"{name:<{name_width}}  {value:<{value_width}}  [{source}]" for name, value, source in shown)


def replace_rows(rows: Iterable[ReportRow], decided: Mapping[str, tuple[object, Source]]) -> Iterator[ReportRow]:
    """Yield the rows with decided values in place of what was asked; a value the user fixed keeps its source."""
    for row in rows:
        if row.name not in decided:
            yield row
            continue
        value, source = decided[row.name]
        yield ReportRow(name=row.name, value=value, source=row.source if row.value == value else source)


def _default(field: FieldInfo) -> object:
    return "(required)" if field.is_required() else field.default


def _row(name: str, value: object, default: object, sources: Mapping[str, str] | None) -> ReportRow:
    is_default = default is not MISSING and value == default
    return ReportRow(name=name, value=value, source=_source(name, sources, "default" if is_default else "user"))


def _source(name: str, sources: Mapping[str, str] | None, fallback: str) -> Source:
    return cast("Source", (sources or {}).get(name, fallback))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, SpeculativeBase):
        return f"{value.method}({value.num_speculative_tokens})"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return str(value)
