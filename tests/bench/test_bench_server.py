"""bench_server.py against two scripted servers: fairness of the plan, the JSON line, the table of the README."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.arms import parse_arm
from benchmarks.bench_server import main, parse_args, plan
from benchmarks.figures import FIGURES, markdown, write_readme
from specdec.errors import ConfigError
from specdec.tools.prompts import warmup_prompts
from tests.bench.fake_server import TOKENS_PER_ANSWER, fake_server

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--concurrency", "1", "2", "--num-requests", "2", "--repeats", "2", "--warmup", "1", "--rate", "50"]


def test_no_prompt_is_used_twice_in_a_servers_life() -> None:
    cells = plan(parse_args(["--concurrency", "1", "4", "--rate", "0.5", "--repeats", "3"])).cells()
    assert [(cell.load.workload, cell.load.concurrency, cell.load.rate) for cell in cells[:3]] == [
        ("chat", 1, None),
        ("chat", 4, None),
        ("chat", 1, 0.5),
    ]
    used = [prompt for cell in cells for repeat in range(3) for prompt in cell.prompts(repeat)]
    assert len(used) == len(set(used)) == 2 * 3 * (6 + 8 + 10)


def test_a_plan_without_enough_prompts_is_refused_before_measuring() -> None:
    with pytest.raises(ConfigError, match="chat has"):
        plan(parse_args(["--workload", "chat", "--num-requests", "700", "--repeats", "2"])).cells()


def test_two_servers_get_the_same_prompts_and_one_json_line_comes_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results" / "server.jsonl"
    with fake_server() as one, fake_server() as two:
        urls = ["--url", one.url, "--url", two.url, "--label", "off", "--label", "on"]
        assert main([*urls, "--workload", "copy", "--results", str(results), "--note", "trial", *SMALL]) == 0
        sent = [sorted(body["messages"][0]["content"] for body in server.bodies) for server in (one, two)]
    assert sent[0] == sent[1]
    measured = [prompt for prompt in sent[0] if prompt not in warmup_prompts("copy", 32)]
    assert len(measured) == len(set(measured)) == 12
    line = json.loads(results.read_text(encoding="utf-8"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == line
    assert line["note"] == "trial"
    assert line["arms"] == {"off": one.url, "on": two.url}
    assert [cell["load"]["rate"] for cell in line["cells"]] == [None, None, 50.0]
    for cell in line["cells"]:
        assert cell["num_tokens"] == {"off": [2 * TOKENS_PER_ANSWER] * 2, "on": [2 * TOKENS_PER_ANSWER] * 2}
        assert cell["figures"]["on"]["acceptance_length"] == [2.0, 2.0, 2.0]
        assert len(cell["ratio"]["on"]) == 2
        assert "off" not in cell["ratio"]


def test_failed_requests_fail_the_run_after_its_line_is_kept(tmp_path: Path) -> None:
    results = tmp_path / "server.jsonl"
    with fake_server() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.tools.bench.prompts_for", lambda *_, skip: [f"FAIL {skip}", "fine"])
        with pytest.raises(ConfigError, match="2 requests failed"):
            main(
                [
                    "--url",
                    server.url,
                    "--workload",
                    "chat",
                    "--concurrency",
                    "1",
                    "--repeats",
                    "2",
                    "--num-requests",
                    "2",
                    "--results",
                    str(results),
                ]
            )
    assert json.loads(results.read_text(encoding="utf-8"))["cells"][0]["num_errors"] == {server.url: 2}


def line_of_results() -> dict[str, object]:
    figures = {"tok_per_s": [50.4, 49.0, 51.0], "acceptance_length": None}
    faster = {"tok_per_s": [75.6, 70.0, 80.0], "acceptance_length": [3.456, 3.0, 4.0]}
    cell = {
        "load": {"workload": "copy", "concurrency": 4, "rate": None},
        "figures": {"off": figures, "on": faster},
        "ratio": {"on": [1.4, 1.9, 1.5]},
    }
    slower = {**cell, "load": {"workload": "chat", "concurrency": 1, "rate": 2.0}, "ratio": {"on": [0.9]}}
    return {
        "cells": [cell, slower], "repeats": 3, "max_tokens": 128, "gpu": None, "cpu": "Some CPU", "cores": 2, "torch": "2.13.0",
        "commit": "abc1234", "time": "2026-12-01T00:00:00Z", "arms": {"off": "specdec serve --no-speculation", "on": "specdec serve"},
    }  # fmt: skip


def test_the_readmes_table_keeps_losing_rows_and_names_the_machine() -> None:
    text = markdown(line_of_results())
    assert "| copy, 4 clients | 50 | 76 | 1.50 | 3.46 |" in text
    assert "| chat, 2/s | 50 | 76 | 0.90 | 3.46 |" in text
    assert "Some CPU, 2 cores; torch 2.13.0; median of 3" in text


def test_the_readme_block_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "server.jsonl"
    readme.write_text(f"before\n{FIGURES.begin}\nold\n{FIGURES.end}\nafter\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no results"):
        write_readme(readme, results)
    results.write_text("{}\n" + json.dumps(line_of_results()) + "\n", encoding="utf-8")
    write_readme(readme, results)
    write_readme(readme, results)
    text = readme.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{FIGURES.begin}\n| load ")
    assert text.endswith(f"{FIGURES.end}\nafter\n")
    assert "old" not in text
    assert text.count("copy, 4 clients") == 1


def test_the_readme_of_this_repository_has_the_block() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index(FIGURES.begin) < text.index(FIGURES.end)


def test_arms_are_named_and_quoted_like_a_shell() -> None:
    arm = parse_arm("""ngram=--speculative-config '{"method": "ngram"}'""", "--port 1")
    assert arm.label == "ngram"
    assert arm.serve_args == ("--port", "1", "--speculative-config", '{"method": "ngram"}')
    with pytest.raises(ConfigError, match="NAME=ARGS"):
        parse_arm("--no-speculation", "")


def test_errors_of_the_program_are_two_lines() -> None:
    command = [sys.executable, "benchmarks/bench_server.py", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith("error: no model is served at http://127.0.0.1:9")
    assert "Traceback" not in done.stderr


def test_an_arm_may_be_another_engine() -> None:
    arm = parse_arm("vllm=@/opt/env/bin/vllm serve a-model --dtype bfloat16", "--max-num-seqs 4")
    assert arm.program == ("/opt/env/bin/vllm", "serve", "a-model", "--dtype", "bfloat16")
    assert arm.describe() == "vllm serve a-model --dtype bfloat16"
    assert parse_arm("off=--no-speculation", "").describe() == "specdec serve --no-speculation"
