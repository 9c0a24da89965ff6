"""specdec bench: the sides, their turns, the table and the JSON line, against scripted servers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec.cli import app
from specdec.errors import ConfigError
from specdec.tools.bench import Plan, Side, lower_bound, run_cells
from specdec.tools.bench_command import run, sides_of
from specdec.tools.bench_table import ratio, spread
from specdec.tools.samples import LATENCY_FIGURES
from tests.bench.fake_server import TOKENS_PER_ANSWER, fake_server


def test_several_servers_share_prompts_and_each_answers_them_once(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    with fake_server() as one, fake_server() as two:
        argv = ["bench", "--url", one.url, "--url", two.url + "/v1/", "--label", "old", "--label", "new", "--model", "a", "--model", "b"]
        load = ["--workload", "all", "--concurrency", "1", "--concurrency", "2", "--num-requests", "3"]
        done = CliRunner().invoke(app, [*argv, *load, "--repeats", "2", "--warmup", "1", "--max-tokens", "9", "--json", str(path)])
        assert done.exit_code == 0, done.output
        sent = [[body["messages"][0]["content"] for body in server.bodies] for server in (one, two)]
        assert {body["model"] for body in one.bodies} == {"a"}
        assert {body["model"] for body in two.bodies} == {"b"}
    assert sorted(sent[0]) == sorted(sent[1])
    assert len(set(sent[0])) == 2 + 2 * 2 * 2 * 3  # warm-up; workloads, loads, repeats, requests
    line = json.loads(path.read_text(encoding="utf-8"))
    assert json.loads(done.stdout.splitlines()[-1]) == line
    assert line["servers"] == {"old": one.url, "new": two.url + "/v1/"}
    assert [(cell["load"]["workload"], cell["load"]["concurrency"]) for cell in line["cells"]] == [
        ("chat", 1),
        ("chat", 2),
        ("copy", 1),
        ("copy", 2),
    ]
    for cell in line["cells"]:
        assert cell["num_tokens"] == {"old": [3 * TOKENS_PER_ANSWER] * 2, "new": [3 * TOKENS_PER_ANSWER] * 2}
        assert set(cell["figures"]["new"]) >= {*LATENCY_FIGURES, "tok_per_s", "req_per_s"}
        assert cell["figures"]["new"]["acceptance_length"] == [2.0, 2.0, 2.0]
        assert len(cell["ratio"]["new"]) == 2


def test_sides_take_turns_and_the_order_turns_round() -> None:
    order: list[str] = []
    with fake_server() as server:
        sides = [Side(label=name, url=server.url, extra_body={"user": name}) for name in ("one", "two")]
        plan = Plan(num_requests=2, repeats=2, warmup=0)
        asyncio.run(run_cells(sides, plan.cells(), plan))
        order = [body["user"] for body in server.bodies]
    assert order == ["one", "one", "two", "two", "two", "two", "one", "one"]


def test_the_table_has_quantiles_and_a_ratio_for_several_servers(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as one, fake_server() as two:
        run(sides_of([one.url, two.url], labels=["old", "new"], models=[], api_key=None), Plan(num_requests=1, warmup=0))
        run(sides_of([one.url], labels=[], models=[], api_key=None), Plan(num_requests=1, warmup=0))
    both, _, alone = capsys.readouterr().out.partition("\n{")
    assert "p50 / p90 / p99" in both
    assert "ratio" in both
    assert "ratio" not in alone.partition("\n")[2].partition("\n{")[0]


def test_a_server_that_answers_nothing_fails_the_run_after_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.tools.bench.prompts_for", lambda *_, skip: [f"FAIL {skip}"])
        with pytest.raises(ConfigError, match="every request to it failed"):
            run([Side(label="it", url=server.url)], Plan(num_requests=1, warmup=0))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cells"][0]["num_errors"] == {"it": 1}


def test_no_server_is_an_error_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"no model is served at http://127.0.0.1:9") as caught:
        run([Side(label="it", url="http://127.0.0.1:9")], Plan())
    assert "specdec serve" in str(caught.value.hint)


def test_sides_need_names_of_their_own() -> None:
    with pytest.raises(ConfigError, match="1 --label for 2 --url"):
        sides_of(["a", "b"], labels=["x"], models=[], api_key=None)
    with pytest.raises(ConfigError, match="same name"):
        sides_of(["a", "a"], labels=[], models=[], api_key=None)


def test_one_measurement_has_no_spread() -> None:
    assert spread([2.0, 2.0, 2.0], 1) == "2.0"
    assert spread([2.0, 1.0, 3.0], 1) == "2.0 \\[1.0 to 3.0]"
    assert ratio([1.5]) == "1.50"
    assert ratio([1.5, 2.0, 1.0]) == "1.50 \\[1.00 to 2.00]"
    assert ratio([]) == ""


def test_the_lower_bound_is_students() -> None:
    """Seven pairs: exp(mean - 2.447 s / sqrt(7)) of the logs, 2.447 being the quantile of Student's t with 6 degrees of freedom."""
    ratios = [0.95, 1.02, 1.08, 0.99, 1.03, 0.97, 1.04]
    bound = lower_bound(ratios)
    assert bound is not None
    assert abs(bound - 0.9703) < 5e-4
    assert lower_bound(ratios[:4]) is None
    assert lower_bound([1.0] * 30) == 1.0
    assert lower_bound([1.0, 0.0, 1.0, 1.0, 1.0]) is None
