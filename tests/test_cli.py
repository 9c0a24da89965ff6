"""The program itself: light to start, errors on two lines with exit code 2, options that reach the configuration."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

import specdec
from specdec import cli
from specdec.config.engine import EMBEDDED_MODEL, EngineConfig
from specdec.errors import ConfigError
from specdec.server.options import ServerOptions
from specdec.tools.serve import Listen, SpeculationFlags, choose_speculation

ROOT = Path(__file__).resolve().parent.parent


def program(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specdec", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **env})


@pytest.mark.parametrize(
    "argv", [["--help"], ["--version"], ["serve", "--help"], ["chat", "--help"], ["bench", "--help"], ["doctor", "--help"]]
)
def test_help_imports_neither_torch_nor_a_server(argv: list[str]) -> None:
    code = (
        "import sys; from specdec import cli\n"
        f"status = cli._run({argv!r})\n"
        "heavy = {'torch', 'transformers', 'numpy', 'numba', 'fastapi', 'uvicorn', 'httpx'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_comes_quickly() -> None:
    spent = []
    for _ in range(3):
        before = os.times()
        assert program("--help").returncode == 0
        after = os.times()
        spent.append(after.children_user - before.children_user + after.children_system - before.children_system)
    assert min(spent) < 0.5, spent  # processor seconds: others may share the machine


def test_version_and_module_agree() -> None:
    assert program("--version").stdout == f"specdec {specdec.__version__}\n"


def test_help_of_serve_groups_the_options() -> None:
    text = program("serve", "--help", COLUMNS="160").stdout
    for title in ("Model", "Cache", "Scheduler", "Speculation", "Server"):
        assert f"─ {title} ─" in text
    for option in (
        "--spec-tokens",
        "--gpu-memory-utilization",
        "--no-enable-prefix-caching",
        "--metrics-compat",
        "--num-gpu-blocks-override",
    ):
        assert option in text


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (["serve", "--tensor-parallel-size", "2"], "--tensor-parallel-size is a flag of vLLM", "one device"),
        (["serve", "--prot", "1"], "no such option: --prot", "specdec serve --help"),
        (["serve", "--port", "x"], "invalid value for '--port'", "specdec serve --help"),
        (["serve", "--port", "70000"], "it should be less than or equal to 65535", "specdec serve --help"),
        (["serve", "--dtype", "int8"], "'int8' is not one of 'auto', 'bfloat16', 'float16', 'float32'", "specdec serve --help"),
        (["serve", "a", "b"], "unexpected extra argument", "specdec serve --help"),
        (["serve", "a", "--model", "b"], "MODEL is 'a' and --model is 'b'", "give the model once"),
        (["serve", "--no-speculation", "--spec-method", "ngram"], "--no-speculation and speculation options are both given", "drop one"),
        (["serve", "-sc", "{oops"], "speculative", ""),
        (["serve", "--log-level", "LOUD"], "'LOUD'", "INFO"),
        (["serve", "--api-key", ""], "empty key", "--api-key"),
        (["serve", "/no/such/directory", "--port", "0"], "'/no/such/directory'", ""),
        (["srve"], "no such command 'srve'", "specdec --help"),
        (["chat", "--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9", "specdec serve"),
        (["bench", "--url", "http://127.0.0.1:9"], "no model is served at http://127.0.0.1:9", "specdec serve"),
    ],
)
def test_mistakes_are_two_lines_and_exit_code_2(argv: list[str], message: str, hint: str) -> None:
    done = program(*argv)
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert hint in lines[-1]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_port_in_use_is_refused_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code = (
            f"import sys; from specdec import cli; status = cli._run(['serve', '--port', '{port}'])\n"
            "assert 'torch' not in sys.modules; sys.exit(status)"
        )
        started_s = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert f"port {port} on '127.0.0.1' is already in use" in done.stderr
    assert time.perf_counter() - started_s < 10  # about one second on an idle machine


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect what `serve` would start instead of starting it."""
    calls: list[Any] = []

    def start(engine: EngineConfig, speculation: SpeculationFlags, *, listen: Listen, options: ServerOptions) -> None:
        calls.append((engine, speculation, listen, options))

    monkeypatch.setattr("specdec.tools.serve.serve", start)
    return calls


def test_without_arguments_the_embedded_model_is_served_with_the_default_drafting(started: list[Any]) -> None:
    assert cli._run(["serve"]) == 0
    assert started == [(EngineConfig(), SpeculationFlags(), Listen(), ServerOptions())]
    assert started[0][0].model.model == EMBEDDED_MODEL


def test_every_option_of_serve_reaches_its_field(started: list[Any]) -> None:
    argv = (
        "serve org/name --served-model-name n --tokenizer t --revision r --dtype float32 --device cpu --max-model-len 512 --seed 5 "
        "--trust-remote-code --block-size 32 --num-gpu-blocks-override 99 --gpu-memory-utilization 0.5 --no-enable-prefix-caching "
        "--max-num-seqs 3 --max_num_batched_tokens 100 --long-prefill-token-threshold 50 --scheduling-policy priority --max-waiting 7 "
        "--no-async-scheduling --speculative-config.method ngram --spec-tokens 4 --spec-model m --host 0.0.0.0 --port 81 "
        "--api-key a --api-key b --cors-origin c --max-body-bytes 2048 --metrics-compat vllm --per-request-spec-decode-metrics detailed "
        "--drain-seconds 1 --log-level DEBUG --log-format json --uds u --ssl-certfile c --ssl-keyfile k --no-ui --request-timeout 9 "
        "--stall-seconds 8 --enable-sleep-mode --otlp-traces-endpoint http://o/v1/traces"
    )
    assert cli._run(argv.split()) == 0
    engine, speculation, listen, options = started[0]
    model, cache, scheduler = engine.model, engine.cache, engine.scheduler
    assert (model.model, model.served_model_name, model.tokenizer, model.revision) == ("org/name", "n", "t", "r")
    assert (model.dtype, engine.device, model.max_model_len, model.seed, model.trust_remote_code) == ("float32", "cpu", 512, 5, True)
    assert (cache.block_size, cache.num_blocks, cache.memory_fraction, cache.enable_prefix_caching) == (32, 99, 0.5, False)
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.long_prefill_token_threshold) == (3, 100, 50)
    assert (scheduler.policy, scheduler.max_waiting, scheduler.async_scheduling) == ("priority", 7, False)
    assert speculation == SpeculationFlags(config='{"method": "ngram"}', model="m", num_tokens=4)
    assert listen == Listen(
        host="0.0.0.0", port=81, uds="u", ssl_certfile="c", ssl_keyfile="k", drain_s=1, log_level="DEBUG", log_format="json"
    )
    assert options == ServerOptions(
        api_keys=("a", "b"),
        cors_origins=("c",),
        max_body_bytes=2048,
        metrics_compat="vllm",
        per_request_spec_decode_metrics="detailed",
        stall_after_s=8,
        request_timeout_s=9,
        has_ui=False,
        enable_sleep_mode=True,
        otlp_traces_endpoint="http://o/v1/traces",
    )


def test_the_command_line_wins_over_the_file(started: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: from-file\nport: 81\nmax_model_len: 64\nspeculative-config: {method: ngram}\nenable-prefix-caching: false\n",
        encoding="utf-8",
    )
    assert cli._run(["serve", "--config", str(path)]) == 0
    assert cli._run(["serve", "mine", "--port", "82", "--spec-method", "suffix", "--config", str(path)]) == 0
    assert cli._run(["serve", "--no-speculation", "--config", str(path)]) == 0
    (first, speculation, listen, _), (second, own, own_listen, _), (_, off, _, _) = started
    assert (first.model.model, first.model.max_model_len, first.cache.enable_prefix_caching, listen.port) == ("from-file", 64, False, 81)
    assert speculation == SpeculationFlags(config='{"method": "ngram"}')
    assert (second.model.model, second.model.max_model_len, own_listen.port) == ("mine", 64, 82)
    assert own == SpeculationFlags(method="suffix")  # the file's speculation is dropped as a whole
    assert off == SpeculationFlags(off=True)


def test_values_of_the_file_are_checked_like_those_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("port: many\n", encoding="utf-8")
    done = program("serve", "--config", str(path))
    assert done.returncode == 2
    assert "invalid value for '--port'" in done.stderr


def test_no_speculation_is_plain_and_nothing_said_is_the_default() -> None:
    from specdec.config.resolve import default_speculative

    assert choose_speculation(SpeculationFlags(off=True), "other") is None
    assert choose_speculation(SpeculationFlags(), "other") == default_speculative("other")
    short = choose_speculation(SpeculationFlags(method="ngram", num_tokens=3), "other")
    assert short is not None
    assert (short.method, short.num_speculative_tokens) == ("ngram", 3)
    with pytest.raises(ConfigError, match="both given"):
        choose_speculation(SpeculationFlags(off=True, num_tokens=3), "other")


def test_doctor_reports_and_exits_0() -> None:
    done = program("doctor")
    assert done.returncode == 0, done.stderr
    rows = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert rows["specdec"] == specdec.__version__
    assert rows["kernels"].split()[0] in {"cpu", "triton", "reference"}
    assert rows["dtype"] in {"packed bfloat16", "bfloat16", "float32"}
    assert "embedded" in rows


def test_the_reference_page_lists_every_option_of_serve() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    command = typer.main.get_command(cli.app)
    names = [
        name for p in command.commands["serve"].params for name in (*p.opts, *p.secondary_opts) if name.startswith("-") and name != "--help"
    ]
    assert len(names) >= 40
    assert [name for name in names if f"`{name}`" not in page] == []
