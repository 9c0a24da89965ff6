"""The command line: the subcommands and how errors are shown. Every import that costs time happens inside its subcommand.

Owns: names, groups and help of the options that are not of serve or train. Must not know: what the engine does with them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from specdec import __version__
from specdec.errors import SpecdecError
from specdec.tools.options import MODEL, SPECULATION, TEST, opt
from specdec.tools.serve_command import serve
from specdec.tools.train_command import train_app

try:
    from typer.exceptions import TyperException as UsageError
except ImportError:  # older typer raises click's own exceptions
    from click import ClickException as UsageError  # type: ignore[assignment]

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode="rich", help="A serving engine whose subject is speculative decoding."
)
app.add_typer(train_app, name="train")
app.command()(serve)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(f"specdec {__version__}")
        raise typer.Exit


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Base URL of a running OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name; none: the first one that the server lists.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 512,
    api_key: Annotated[str | None, typer.Option(help="Key to send, where the server wants one.")] = None,
) -> None:
    """Talk to a running server. /reset starts over, /quit leaves, Ctrl-C stops an answer."""
    from specdec.tools.chat import ChatOptions, run

    run(ChatOptions(url=url, model=model, system=system, temperature=temperature, max_tokens=max_tokens, api_key=api_key))


@app.command()
def doctor() -> None:
    """Say what this machine offers: versions, device, dtype, kernels, embedded model."""
    from specdec.tools.doctor import report

    print(report())


@app.command()
def bench(
    url: Annotated[
        list[str] | None,
        typer.Option(help="Base URL of a running OpenAI-compatible server; repeat to compare.", show_default="http://127.0.0.1:8000"),
    ] = None,
    label: Annotated[list[str] | None, typer.Option(help="A name for each --url, in the same order.", show_default="the URL")] = None,
    model: Annotated[list[str] | None, typer.Option(help="A model for each --url.", show_default="the first it lists")] = None,
    workload: Annotated[
        Literal["chat", "copy", "all"],
        typer.Option(help="chat: questions; copy: texts to repeat and edit; all: both, one after the other."),
    ] = "chat",
    concurrency: Annotated[
        list[int] | None, typer.Option(help="Requests in flight (closed loop). May repeat.", min=1, show_default="1")
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests a second, Poisson arrivals (open loop). May repeat.", min=0.001, show_default="none"),
    ] = None,
    num_requests: Annotated[int, typer.Option(help="Requests of each load and repeat.", min=1)] = 16,
    repeats: Annotated[int, typer.Option(help="Times that each load is measured; servers take turns.", min=1)] = 1,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.", min=1)] = 128,
    warmup: Annotated[int, typer.Option(help="Prompts to warm each server up with; never measured ones.", min=0, max=32)] = 4,
    skip: Annotated[int, typer.Option(help="Prompts that the servers answered before, so that none comes twice.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Arrival times.")] = 0,
    api_key: Annotated[str | None, typer.Option(help="Key to send, where a server wants one.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="File to append the JSON line to.", show_default=False)] = None,
) -> None:
    """Load running servers in turns and print tokens a second, latencies and acceptance length."""
    from specdec.tools.bench import Plan
    from specdec.tools.bench_command import run, sides_of
    from specdec.tools.prompts import WORKLOADS

    plan = Plan(
        workloads=WORKLOADS if workload == "all" else [workload],
        concurrency=concurrency or ([] if rate else [1]),
        rates=rate or [],
        num_requests=num_requests,
        repeats=repeats,
        max_tokens=max_tokens,
        warmup=warmup,
        skip=skip,
        seed=seed,
    )
    sides = sides_of(url or ["http://127.0.0.1:8000"], labels=label or [], models=model or [], api_key=api_key)
    run(sides, plan, json_path=json_path)


@app.command()
def verify(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Directory, .gguf file or hub id; none: the embedded model.", show_default=False)
    ] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], opt("--dtype", group=MODEL, help="float32 leaves no room for rounding.")
    ] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], opt("--device", group=MODEL, help="auto: a GPU when there is one.")] = "auto",
    max_model_len: Annotated[int | None, opt("--max-model-len", group=MODEL, help="Tokens of prompt and answer.")] = None,
    max_num_seqs: Annotated[int, opt("--max-num-seqs", group=MODEL, help="Requests that run at once.")] = 32,
    trust_remote_code: Annotated[bool, opt("--trust-remote-code", group=MODEL, help="Run Python code found in the checkpoint.")] = False,
    speculative_config: Annotated[
        str | None, opt("--speculative-config", "-sc", group=SPECULATION, help="As in serve; none: what serve would use.")
    ] = None,
    spec_method: Annotated[str | None, opt("--spec-method", group=SPECULATION, help="Short for the key method.")] = None,
    spec_model: Annotated[str | None, opt("--spec-model", group=SPECULATION, help="Short for the key model.")] = None,
    spec_tokens: Annotated[int | None, opt("--spec-tokens", group=SPECULATION, help="Short for the key num_speculative_tokens.")] = None,
    speculative_token_map: Annotated[
        str | None, opt("--speculative-token-map", group=SPECULATION, help="Short for the key token_map: file of the ids a head scores.")
    ] = None,
    prompts: Annotated[str | None, opt("--prompts", group=TEST, help="Text file, one prompt a line; none: built-in ones.")] = None,
    temperature: Annotated[float, opt("--temperature", group=TEST, help="Of the sampled answers.")] = 0.8,
    tokens: Annotated[int | None, opt("--tokens", group=TEST, help="Tokens to test for each law; none: 8000, or 2000.")] = None,
    length: Annotated[int | None, opt("--length", group=TEST, help="Tokens of one answer; none: 64, or 32.")] = None,
    samples: Annotated[
        int | None, opt("--samples", group=TEST, help="Short texts a prompt, of the two-sample test; none: 100, or 40.")
    ] = None,
    false_alarm: Annotated[float, opt("--false-alarm", group=TEST, help="How often a correct engine may fail.")] = 1e-4,
    seed: Annotated[int, opt("--seed", group=TEST, help="Of all random numbers.")] = 0,
    quick: Annotated[bool, opt("--quick", group=TEST, help="A quarter of the work: finds coarse errors.")] = False,
    as_json: Annotated[bool, opt("--json", group=TEST, help="Print one JSON object.")] = False,
) -> int:
    """Check on your model that speculation changes nothing: same tokens, same law. Exit code 1 when it does change something."""
    from specdec.config.engine import EMBEDDED_MODEL, EngineConfig, ModelConfig, SchedulerConfig
    from specdec.tools.serve import SpeculationFlags
    from specdec.tools.verify import VerifyOptions
    from specdec.tools.verify_command import QUICK, run_and_print

    name = model or EMBEDDED_MODEL
    engine = EngineConfig(
        device=device,
        model=ModelConfig(model=name, dtype=dtype, max_model_len=max_model_len, trust_remote_code=trust_remote_code),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_waiting=0),
    )
    asked = {"tokens": tokens, "length": length, "tv_samples": samples}
    sizes = (QUICK if quick else {}) | {key: value for key, value in asked.items() if value is not None}
    return run_and_print(
        engine,
        SpeculationFlags(
            config=speculative_config, method=spec_method, model=spec_model, num_tokens=spec_tokens, token_map=speculative_token_map
        ),
        VerifyOptions(temperature=temperature, alpha=false_alarm, seed=seed, **sizes),
        prompts_path=prompts,
        quick=quick,
        as_json=as_json,
    )


@app.command(name="estimate")
def estimate_command(
    alpha: Annotated[float, typer.Option(help="Acceptance rate of one draft, in [0, 1].")] = 0.8,
    k: Annotated[int, typer.Option("--k", help="Drafts per target pass.")] = 4,
    cost: Annotated[float, typer.Option(help="Time of one draft over that of one target step.")] = 0.1,
    alphas: Annotated[str, typer.Option(help="Rows of the table: 0.5,0.6 or first:last:step.")] = "0.5:0.9:0.1",
    costs: Annotated[str, typer.Option(help="Columns of the table, written the same way.")] = "0.02,0.05,0.1,0.33",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Say what speculation gains on paper: tokens per pass, speedup, best number of drafts, and a table."""
    from specdec.tools.estimate import estimate, read_numbers, run_and_print

    point = estimate(alpha, k, cost)
    run_and_print(point, alphas=read_numbers(alphas, "--alphas"), costs=read_numbers(costs, "--costs"), as_json=as_json)


def _show(message: str, hint: str | None) -> None:
    sys.stderr.write(SpecdecError(message, hint=hint).render() + "\n")


def _run(argv: Sequence[str]) -> int:
    """Run one command line; return the exit status. 2 means that the user can mend it; there is no traceback then."""
    argv = list(argv) or ["--help"]
    try:
        if argv[0] in ("serve", "verify"):
            from specdec.tools.argv import normalise

            argv = normalise(argv)
        status = app(argv, prog_name="specdec", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except SpecdecError as error:
        _show(error.message, error.hint)
        return 2
    except UsageError as error:
        message = error.format_message().replace("Value error, ", "").replace("Input should be", "it should be").rstrip(".")
        command = f" {argv[0]}" if argv[0] in COMMANDS else ""
        _show(message[0].lower() + message[1:], f"see specdec{command} --help")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130


COMMANDS = ("serve", "chat", "doctor", "bench", "verify", "estimate", "train")


def main() -> None:
    """Entry point of the `specdec` program."""
    sys.exit(_run(sys.argv[1:]))
