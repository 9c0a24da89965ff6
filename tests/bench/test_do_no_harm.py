"""benchmarks/do_no_harm.py: pairs in turns round by round, no prompt twice, and what counts as harm."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import do_no_harm
from benchmarks.arms import Arm
from benchmarks.mixed import ProcessView
from specdec.errors import ConfigError
from specdec.tools import bench
from specdec.tools.prompts import warmup_prompts
from tests.bench.fake_server import FakeServer, fake_server

SMALL = ["--concurrency", "1", "2", "--num-requests", "2", "--seconds", "0", "--max-others", "1000"]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Arm, FakeServer]]:
    """Scripted servers in the place of ours, with the arms that asked for them."""
    seen: list[tuple[Arm, FakeServer]] = []

    @contextlib.contextmanager
    def spawned(arms: Sequence[Arm]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for arm in arms:
                server = stack.enter_context(fake_server())
                arm.url = server.url
                seen.append((arm, server))
            yield

    monkeypatch.setattr(do_no_harm, "spawned", spawned)
    return seen


def measured(server: FakeServer) -> list[str]:
    texts = [body["messages"][0]["content"] for body in server.bodies]
    return [text for text in texts if text not in warmup_prompts("chat", 32)]


def test_both_servers_answer_each_prompt_once_and_a_line_comes_out(
    servers: list[tuple[Arm, FakeServer]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    code = do_no_harm.main([*SMALL, "--pairs", "5", "--anti", "--results", str(results)])
    (off, plain), (on, drafting) = servers
    assert off.serve_args is not None
    assert on.serve_args is not None
    assert "--no-speculation" in off.serve_args
    assert json.loads(on.serve_args[-1]) == do_no_harm.ANTI
    assert "--no-enable-prefix-caching" in off.serve_args
    assert "--no-enable-prefix-caching" in on.serve_args
    assert all("ignore_eos" not in body for body in plain.bodies + drafting.bodies)
    assert sorted(measured(plain)) == sorted(measured(drafting))
    assert len(set(measured(plain))) == len(measured(plain)) == 5 * 2 * 2  # rounds, loads, requests
    line = json.loads(results.read_text(encoding="utf-8"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == line
    assert line["pairs"] == 5
    assert all(len(cell["ratio"]["on"]) == 5 and cell["ratio_at_least"]["on"] for cell in line["cells"])
    assert code == (1 if line["faults"] else 0)


def test_the_order_turns_round_from_round_to_round(
    servers: list[tuple[Arm, FakeServer]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[int, str]] = []

    async def run_repeat(clients: Any, cell: Any, number: int) -> None:
        await bench.run_repeat(clients, cell, number, on_side=lambda label: order.append((cell.load.concurrency, label)))

    monkeypatch.setattr(do_no_harm, "run_repeat", run_repeat)
    do_no_harm.main([*SMALL, "--pairs", "2", "--results", str(tmp_path / "r.jsonl")])
    assert [label for size, label in order if size == 1] == ["off", "on", "on", "off"]
    assert [size for size, _ in order] == [1, 1, 2, 2] * 2, "each round has each load"


def test_rounds_are_added_while_there_is_time_and_prompts(servers: list[tuple[Arm, FakeServer]], tmp_path: Path) -> None:
    argv = ["--concurrency", "1", "--num-requests", "150", "--pairs", "1", "--max-others", "1000", "--results", str(tmp_path / "r.jsonl")]
    do_no_harm.main([*argv, "--seconds", "1000"])
    assert json.loads((tmp_path / "r.jsonl").read_text(encoding="utf-8"))["pairs"] == 1344 // 150


def test_the_standard_plan_has_prompts_for_a_dozen_rounds_none_twice() -> None:
    cells = do_no_harm.cells_of(do_no_harm.parse_args([]))
    assert [cell.load.concurrency for cell in cells] == [1, 4, 8, 16, 32]
    used = [prompt for cell in cells for number in range(12) for prompt in cell.prompts(number)]
    assert len(used) == len(set(used)) == 12 * 108
    with pytest.raises(ConfigError, match="13 rounds of 108 prompts are asked for, but chat has 1344"):
        do_no_harm.cells_of(do_no_harm.parse_args(["--pairs", "13"]))


def cell(bound: float | None, *, pairs: int = 7, errors: int = 0) -> dict[str, Any]:
    return {
        "load": {"concurrency": 16},
        "ratio": {"on": [1.0] * pairs},
        "ratio_at_least": {"on": bound},
        "num_errors": {"off": 0, "on": errors},
    }


def test_harm_is_a_bound_that_is_not_above_the_limit_or_a_run_that_says_nothing() -> None:
    def faults(cells: list[dict[str, Any]], others: float = 0.1) -> list[str]:
        return do_no_harm.faults_of(cells, others, 0.25)

    assert faults([cell(0.951), cell(1.2)]) == []
    assert faults([cell(0.95), cell(1.2)]) == ["16 in flight: the ratio is at least 0.950, which is not above 0.95"]
    assert faults([cell(None, pairs=3)]) == ["16 in flight: 3 pairs are too few for an interval"]
    assert faults([cell(1.0, errors=2)]) == ["2 requests failed"]
    assert faults([cell(1.0)], others=0.5) == ["other processes kept 0.50 cores busy, the limit is 0.25: run it again on a quiet machine"]


def test_a_servers_own_processes_are_not_others() -> None:
    """A server whose proposer runs in a process of its own, as the drafter that is always wrong does."""
    busy = "import time\nwhile time.process_time() < 0.4: pass\nprint('done', flush=True)\ntime.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as server:
        try:
            before = do_no_harm.Machine.now([])
            assert server.stdout is not None
            assert server.stdout.readline() == b"done\n"
            (child,) = ProcessView(server.pid).children()
            assert ProcessView(child).cpu_s() >= 0.3
            now = do_no_harm.Machine.now([Arm("on", pid=server.pid)])
            assert now.own_s - before.own_s >= 0.3
        finally:
            for pid in ProcessView(server.pid).children():
                subprocess.run(["kill", str(pid)], check=False)
            server.kill()
