"""Guides promise only what the program has: error texts are in the code, options, metrics, fields and configs exist."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import typer
import yaml

from specdec import cli
from specdec.config.speculative import MODELS, build, check_built
from specdec.metrics.prometheus import own_rows
from specdec.server.protocol import Speculative
from specdec.tools.config_file import read_options

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"
CONCEPTS = ROOT / "docs" / "concepts"
MINE = [
    GUIDES / f"{name}.md" for name in ("choose-a-method", "read-the-metrics", "when-speculation-hurts", "troubleshooting", "production")
]
MINE += [CONCEPTS / f"{name}.md" for name in ("token-accounting", "lookahead-slots", "draft-kv")]
FOREIGN = {"--num-lookahead-slots"}  # of vLLM, named as refused
HTTP_METRICS = {"specdec_http_requests_total"}


def texts_of(tree: ast.AST) -> list[str]:
    """Return every string of a module; what is filled in at run time reads as one …."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"%(?:\.\d)?[sdrf]", "…", node.value))
    return found


@pytest.fixture(scope="module")
def program_texts() -> list[str]:
    return [text for path in (ROOT / "specdec").rglob("*.py") for text in texts_of(ast.parse(path.read_text(encoding="utf-8")))]


def error_texts() -> list[str]:
    """Return the quoted texts of the troubleshooting tables that are messages: those with a … or several words."""
    page = (GUIDES / "troubleshooting.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    cells = [cell for row in rows for cell in row[:2] if cell.strip("| ").startswith("`")]
    quoted = [re.findall(r"`([^`]+)`", cell)[0] for cell in cells]
    return [text for text in quoted if " " in text and not text.startswith("--spec")]


@pytest.mark.parametrize("text", error_texts())
def test_error_texts_of_the_page_are_in_the_code(text: str, program_texts: list[str]) -> None:
    pattern = re.compile(".*?".join(re.escape(part) for part in text.strip("…").split("…")), flags=re.DOTALL)
    assert any(pattern.search(candidate.replace("`", "")) for candidate in program_texts), text


def test_there_are_enough_error_texts_and_a_wrong_one_is_seen(program_texts: list[str]) -> None:
    assert len(error_texts()) >= 30
    assert not any("port … on … is taken" in candidate for candidate in program_texts)


def options() -> set[str]:
    command = typer.main.get_command(cli.app)
    return {name for sub in command.commands.values() for p in sub.params for name in (*p.opts, *p.secondary_opts)}  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", MINE, ids=lambda page: page.stem)
def test_options_and_metrics_named_in_guides_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    own = re.sub(r"docker \w+ [^`\n]*|systemctl [^`\n]*", "", text)
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", own)) - FOREIGN <= options()
    exported = {row.name + ("_total" if row.kind == "counter" else "") for row in own_rows(4)} | HTTP_METRICS
    exported |= {row.name + end for row in own_rows(4) if row.kind == "histogram" for end in ("_sum", "_count", "_bucket")}
    assert set(re.findall(r"\bspecdec_\w+", text)) <= exported


def test_options_on_the_right_of_the_migration_tables_exist() -> None:
    page = (GUIDES / "migrate.md").read_text(encoding="utf-8")
    right = [line.strip("| ").split(" | ")[-1] for line in page.splitlines() if line.startswith("| `")]
    assert len(right) > 35
    assert {name for cell in right for name in re.findall(r"(?<![\w-])--[a-z][\w-]+", cell)} <= options()
    keys = {key for model in MODELS.values() for key in model.model_fields} | Speculative.model_fields.keys() | {"speculative"}
    values = set(MODELS) | {"probabilistic", "block", "typical", "adaptive", "D"}
    assert {word for cell in right for word in re.findall(r'"(\w+)"', cell)} <= keys | values


def test_configs_in_the_guides_are_accepted() -> None:
    text = (GUIDES / "choose-a-method.md").read_text(encoding="utf-8")
    block = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)[0]
    decoder, at, methods = json.JSONDecoder(), 0, []
    block = block.strip()
    while at < len(block):
        value, end = decoder.raw_decode(block, at)
        config = build(value)
        check_built(config)
        methods.append(config.method)
        at = end + len(block[end:]) - len(block[end:].lstrip())
    assert methods == ["ngram", "suffix", "draft_model", "eagle3", "early_exit", "hybrid"]


def test_the_config_file_of_the_checklist_is_read(tmp_path: Path) -> None:
    text = (GUIDES / "production.md").read_text(encoding="utf-8")
    block = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)[0]
    path = tmp_path / "serve.yaml"
    path.write_text(re.sub(r"^ {3}", "", block, flags=re.MULTILINE), encoding="utf-8")
    serve = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    known = {name.lstrip("-"): str(p.name) for p in serve.params for name in p.opts if name.startswith("--")}
    found = read_options(str(path), known)
    assert found["request_timeout"] == 300
    check_built(build(json.loads(found["speculative_config"])))
    assert yaml.safe_load(path.read_text(encoding="utf-8")).keys() >= {"model", "max-waiting"}


@pytest.mark.parametrize("method", sorted({"ngram", "ngram_gpu", "suffix", "custom_class", "draft_model", "eagle", "eagle3", "early_exit"}))
def test_the_pages_on_lookahead_and_draft_kv_agree_with_the_table_of_needs(method: str) -> None:
    from specdec.config.methods import _METHODS, DraftKV, _Draft

    class Config:
        draft_sample_method, parallel_drafting, exit_layer, model = "greedy", False, 1, None

    config = Config()
    config.method = method  # type: ignore[attr-defined]
    traits = _METHODS[method](_Draft(config, 5, {}, 12))
    lookahead = (CONCEPTS / "lookahead-slots.md").read_text(encoding="utf-8")
    row = next(line for line in lookahead.splitlines() if line.startswith("| `") and f"`{method}`" in line)
    assert row.split(" | ")[1] == {0: "0", 5: "K"}[traits.lookahead]
    kinds = {DraftKV.NONE: "| none |", DraftKV.OWN: "| own |", DraftKV.TARGET: "| target's |"}
    kv = (CONCEPTS / "draft-kv.md").read_text(encoding="utf-8")
    assert next(line for line in kv.splitlines() if line.startswith(kinds[traits.kv]) and f"`{method}`" in line)
