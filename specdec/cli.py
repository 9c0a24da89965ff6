"""The command line: serve, chat, bench, verify, estimate, doctor. Every import that costs time happens inside its subcommand.

Owns: names, groups and help of the options, and how errors are shown. Must not know: what the engine does with them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specdec import __version__
from specdec.errors import ConfigError, SpecdecError
from specdec.tools.train_command import train_app

if TYPE_CHECKING:
    from specdec.tools.serve import SpeculationFlags

try:
    from typer.exceptions import TyperException as UsageError
except ImportError:  # older typer raises click's own exceptions
    from click import ClickException as UsageError  # type: ignore[assignment]

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode="rich", help="A serving engine whose subject is speculative decoding."
)
app.add_typer(train_app, name="train")
MODEL, CACHE, SCHEDULER, EXECUTION, SPECULATION, SERVER, TEST = (
    "Model",
    "Cache",
    "Scheduler",
    "Execution",
    "Speculation",
    "Server",
    "Test",
)


def _opt(*names: str, group: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=group, help=help, **more)


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Read `1,2,4`; spaces separate too."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise ConfigError(f"{option} is {text!r}, but it must be whole numbers", hint=f"write {option} 1,2,4,8") from None


def _read_config_file(ctx: typer.Context, path: str | None) -> str | None:
    """Make the file's values the defaults of this command, so that the command line wins over them."""
    if path is not None:
        from specdec.tools.config_file import read_options

        known = {
            name.lstrip("-"): str(p.name) for p in ctx.command.params for name in p.opts if name.startswith("--") and p.name != "config"
        }
        ctx.default_map = read_options(path, known)
    return path


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(f"specdec {__version__}")
        raise typer.Exit


@app.command()
def serve(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Directory, .gguf file or hub id; none: SmolLM2-135M-Instruct, embedded.", show_default=False),
    ] = None,
    model_option: Annotated[str | None, _opt("--model", group=MODEL, help="The same as MODEL, as vLLM spells it.")] = None,
    served_model_name: Annotated[str | None, _opt("--served-model-name", group=MODEL, help="Name in the API and in metric labels.")] = None,
    tokenizer: Annotated[str | None, _opt("--tokenizer", group=MODEL, help="Directory or hub id, when it is not the model's own.")] = None,
    revision: Annotated[str | None, _opt("--revision", group=MODEL, help="Branch, tag or commit of a hub id.")] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        _opt("--dtype", group=MODEL, help="auto: bfloat16 where the device is fast at it."),
    ] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], _opt("--device", group=MODEL, help="auto: a GPU when there is one.")] = "auto",
    max_model_len: Annotated[
        int | None, _opt("--max-model-len", group=MODEL, help="Tokens of prompt and answer; at most the model's.")
    ] = None,
    seed: Annotated[int, _opt("--seed", group=MODEL, help="Seed of requests that bring none.")] = 0,
    trust_remote_code: Annotated[bool, _opt("--trust-remote-code", group=MODEL, help="Run Python code found in the checkpoint.")] = False,
    block_size: Annotated[int, _opt("--block-size", group=CACHE, help="Tokens in one KV block.")] = 16,
    num_blocks: Annotated[
        int | None, _opt("--num-blocks", "--num-gpu-blocks-override", group=CACHE, help="KV blocks; none: from --memory-fraction.")
    ] = None,
    memory_fraction: Annotated[
        float | None,
        _opt("--memory-fraction", "--gpu-memory-utilization", group=CACHE, help="None: 0.9 of a GPU, 0.3 of free memory on a CPU."),
    ] = None,
    enable_prefix_caching: Annotated[
        bool, _opt("--enable-prefix-caching/--no-enable-prefix-caching", group=CACHE, help="Reuse the KV of equal prompt starts.")
    ] = True,
    max_num_seqs: Annotated[int, _opt("--max-num-seqs", group=SCHEDULER, help="Requests that run at once.")] = 64,
    max_num_batched_tokens: Annotated[
        int, _opt("--max-num-batched-tokens", group=SCHEDULER, help="Tokens of one step, drafts included.")
    ] = 2048,
    long_prefill_token_threshold: Annotated[
        int, _opt("--long-prefill-token-threshold", group=SCHEDULER, help="Most prompt tokens one request reads in a step; 0: no limit.")
    ] = 0,
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], _opt("--scheduling-policy", group=SCHEDULER, help="Who runs first when not all can.")
    ] = "fcfs",
    max_waiting: Annotated[int, _opt("--max-waiting", group=SCHEDULER, help="Requests that may wait; more get 429. 0: no limit.")] = 1024,
    async_scheduling: Annotated[
        bool, _opt("--async-scheduling/--no-async-scheduling", group=SCHEDULER, help="Plan a step while the one before runs.")
    ] = True,
    enforce_eager: Annotated[bool, _opt("--enforce-eager", group=EXECUTION, help="Capture no CUDA graphs.")] = False,
    cudagraph_capture_sizes: Annotated[
        str | None,
        _opt(
            "--cudagraph-capture-sizes",
            "--cuda-graph-sizes",
            group=EXECUTION,
            help="Query rows of the steps to capture as CUDA graphs, separated by commas.",
        ),
    ] = None,
    attention_backend: Annotated[
        str, _opt("--attention-backend", group=EXECUTION, help="auto, triton, sdpa or flashinfer, or vLLM's name of it; GPUs only.")
    ] = "auto",
    speculative_config: Annotated[
        str | None,
        _opt("--speculative-config", "-sc", group=SPECULATION, help="JSON with vLLM's keys; also --speculative-config.KEY VALUE."),
    ] = None,
    spec_method: Annotated[str | None, _opt("--spec-method", group=SPECULATION, help="Short for the key method.")] = None,
    spec_model: Annotated[str | None, _opt("--spec-model", group=SPECULATION, help="Short for the key model.")] = None,
    spec_tokens: Annotated[int | None, _opt("--spec-tokens", group=SPECULATION, help="Short for the key num_speculative_tokens.")] = None,
    speculative_token_map: Annotated[
        str | None, _opt("--speculative-token-map", group=SPECULATION, help="Short for the key token_map: file of the ids a head scores.")
    ] = None,
    suffix_corpus: Annotated[
        list[str] | None,
        _opt("--suffix-corpus", group=SPECULATION, help="Text or .jsonl file that suffix drafting learns at start; may be repeated."),
    ] = None,
    suffix_share_responses: Annotated[
        bool,
        _opt(
            "--suffix-share-responses",
            group=SPECULATION,
            help="Let suffix drafting learn from every client's responses; timing may then tell of another's text.",
        ),
    ] = False,
    no_speculation: Annotated[bool, _opt("--no-speculation", group=SPECULATION, help="Decode plainly, one token a step.")] = False,
    host: Annotated[str, _opt("--host", group=SERVER, help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, _opt("--port", group=SERVER, help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8000,
    uds: Annotated[str | None, _opt("--uds", group=SERVER, help="Path of a Unix socket to listen on, instead of host and port.")] = None,
    ssl_certfile: Annotated[str | None, _opt("--ssl-certfile", group=SERVER, help="PEM certificate chain: serve HTTPS.")] = None,
    ssl_keyfile: Annotated[str | None, _opt("--ssl-keyfile", group=SERVER, help="PEM key of the certificate, without passphrase.")] = None,
    api_key: Annotated[list[str] | None, _opt("--api-key", group=SERVER, help="Key that clients must send; may be repeated.")] = None,
    api_key_file: Annotated[
        str | None, _opt("--api-key-file", group=SERVER, help="More keys, one a line; also $SPECDEC_API_KEYS, separated by spaces.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, _opt("--cors-origin", group=SERVER, help="Origin that browsers may call from; may be repeated.")
    ] = None,
    max_body_bytes: Annotated[int, _opt("--max-body-bytes", group=SERVER, help="Largest request body.")] = 16 * 1024 * 1024,
    metrics_compat: Annotated[
        Literal["none", "vllm"], _opt("--metrics-compat", group=SERVER, help="vllm: also export vLLM's metric names.")
    ] = "none",
    per_request_spec_decode_metrics: Annotated[
        Literal["none", "summary", "detailed"],
        _opt("--per-request-spec-decode-metrics", group=SERVER, help="Speculation figures in each response."),
    ] = "none",
    enable_auto_tool_choice: Annotated[
        bool,
        _opt(
            "--enable-auto-tool-choice/--no-enable-auto-tool-choice", group=SERVER, help="Let the model decide to call a request's tools."
        ),
    ] = True,
    tool_call_parser: Annotated[
        str, _opt("--tool-call-parser", group=SERVER, help="auto (from the chat template), hermes, llama3_json, mistral.")
    ] = "auto",
    reasoning_parser: Annotated[
        str | None, _opt("--reasoning-parser", group=SERVER, help="Tell <think> from content: qwen3 or deepseek_r1; none: all is content.")
    ] = None,
    enable_sleep_mode: Annotated[
        bool, _opt("--enable-sleep-mode", group=SERVER, help="Serve /sleep, /wake_up and /reload_weights; needs an API key.")
    ] = False,
    otlp_traces_endpoint: Annotated[
        str | None, _opt("--otlp-traces-endpoint", group=SERVER, help="URL to send OpenTelemetry traces to; needs specdec[otel].")
    ] = None,
    ui: Annotated[bool, _opt("--ui/--no-ui", group=SERVER, help="Serve the playground at /.")] = True,
    request_timeout: Annotated[
        float | None, _opt("--request-timeout", group=SERVER, help="Seconds that a body, and then an answer, may take; none: no limit.")
    ] = None,
    stall_seconds: Annotated[
        float, _opt("--stall-seconds", group=SERVER, help="/health turns red when work waits and no step ended for so long.")
    ] = 60.0,
    drain_seconds: Annotated[float, _opt("--drain-seconds", group=SERVER, help="Time running requests get after SIGTERM.", min=0)] = 30.0,
    log_level: Annotated[
        str | None, _opt("--log-level", group=SERVER, help="DEBUG, INFO, WARNING, ERROR; none: $SPECDEC_LOG_LEVEL or INFO.")
    ] = None,
    log_format: Annotated[Literal["text", "json"], _opt("--log-format", group=SERVER, help="One line an event, as text or JSON.")] = "text",
    config: Annotated[  # noqa: ARG001 - read by its callback, before the other options
        str | None,
        _opt("--config", group=SERVER, help="YAML file of options; the command line wins.", is_eager=True, callback=_read_config_file),
    ] = None,
) -> None:
    """Start an OpenAI-compatible server. Without arguments: the embedded model, speculation on, port 8000."""
    from specdec.config.engine import EMBEDDED_MODEL, CacheConfig, EngineConfig, ExecutionConfig, ModelConfig, SchedulerConfig
    from specdec.server.options import ServerOptions
    from specdec.tools.api_keys import collect_keys
    from specdec.tools.serve import Listen, SpeculationFlags
    from specdec.tools.serve import serve as start

    if model and model_option and not _from_file(ctx, "model_option"):
        raise ConfigError(f"MODEL is {model!r} and --model is {model_option!r}", hint="give the model once")
    engine = EngineConfig(
        device=device,
        suffix_share_responses=suffix_share_responses,
        suffix_corpora=tuple(suffix_corpus or ()),
        model=ModelConfig(
            model=model or model_option or EMBEDDED_MODEL,
            tokenizer=tokenizer,
            revision=revision,
            dtype=dtype,
            max_model_len=max_model_len,
            served_model_name=served_model_name,
            seed=seed,
            trust_remote_code=trust_remote_code,
        ),
        cache=CacheConfig(
            block_size=block_size, num_blocks=num_blocks, memory_fraction=memory_fraction, enable_prefix_caching=enable_prefix_caching
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=long_prefill_token_threshold,
            policy=scheduling_policy,
            max_waiting=max_waiting,
            async_scheduling=async_scheduling,
        ),
        execution=ExecutionConfig(
            enforce_eager=enforce_eager,
            cudagraph_capture_sizes=_numbers("--cudagraph-capture-sizes", cudagraph_capture_sizes),
            attention_backend=ExecutionConfig.backend_named(attention_backend),
        ),
    )
    start(
        engine,
        _drop_file_speculation(
            ctx,
            SpeculationFlags(
                config=speculative_config,
                method=spec_method,
                model=spec_model,
                num_tokens=spec_tokens,
                token_map=speculative_token_map,
                off=no_speculation,
            ),
        ),
        listen=Listen(
            host=host,
            port=port,
            uds=uds,
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
            drain_s=drain_seconds,
            log_level=log_level,
            log_format=log_format,
        ),
        options=ServerOptions(
            api_keys=collect_keys(api_key or (), api_key_file, os.environ),
            cors_origins=tuple(cors_origin or ()),
            max_body_bytes=max_body_bytes,
            metrics_compat=metrics_compat,
            per_request_spec_decode_metrics=per_request_spec_decode_metrics,
            stall_after_s=stall_seconds,
            request_timeout_s=request_timeout,
            has_ui=ui,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            enable_auto_tool_choice=enable_auto_tool_choice,
            enable_sleep_mode=enable_sleep_mode,
            otlp_traces_endpoint=otlp_traces_endpoint,
        ),
    )


# Parameter of the command line -> field of SpeculationFlags.
SPECULATION_OPTIONS = {
    "speculative_config": "config",
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_tokens",
    "speculative_token_map": "token_map",
    "no_speculation": "off",
}


def _from_file(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT_MAP"


def _drop_file_speculation(ctx: typer.Context, flags: SpeculationFlags) -> SpeculationFlags:
    """Return the flags; when the command line holds any of them, those of the --config file are dropped together."""
    sources = {name: ctx.get_parameter_source(name) for name in SPECULATION_OPTIONS}
    if not any(source is not None and source.name == "COMMANDLINE" for source in sources.values()):
        return flags
    dropped: dict[str, Any] = {
        field: False if field == "off" else None for name, field in SPECULATION_OPTIONS.items() if _from_file(ctx, name)
    }
    return replace(flags, **dropped)


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
        Literal["auto", "bfloat16", "float16", "float32"], _opt("--dtype", group=MODEL, help="float32 leaves no room for rounding.")
    ] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], _opt("--device", group=MODEL, help="auto: a GPU when there is one.")] = "auto",
    max_model_len: Annotated[int | None, _opt("--max-model-len", group=MODEL, help="Tokens of prompt and answer.")] = None,
    max_num_seqs: Annotated[int, _opt("--max-num-seqs", group=MODEL, help="Requests that run at once.")] = 32,
    trust_remote_code: Annotated[bool, _opt("--trust-remote-code", group=MODEL, help="Run Python code found in the checkpoint.")] = False,
    speculative_config: Annotated[
        str | None, _opt("--speculative-config", "-sc", group=SPECULATION, help="As in serve; none: what serve would use.")
    ] = None,
    spec_method: Annotated[str | None, _opt("--spec-method", group=SPECULATION, help="Short for the key method.")] = None,
    spec_model: Annotated[str | None, _opt("--spec-model", group=SPECULATION, help="Short for the key model.")] = None,
    spec_tokens: Annotated[int | None, _opt("--spec-tokens", group=SPECULATION, help="Short for the key num_speculative_tokens.")] = None,
    speculative_token_map: Annotated[
        str | None, _opt("--speculative-token-map", group=SPECULATION, help="Short for the key token_map: file of the ids a head scores.")
    ] = None,
    prompts: Annotated[str | None, _opt("--prompts", group=TEST, help="Text file, one prompt a line; none: built-in ones.")] = None,
    temperature: Annotated[float, _opt("--temperature", group=TEST, help="Of the sampled answers.")] = 0.8,
    tokens: Annotated[int | None, _opt("--tokens", group=TEST, help="Tokens to test for each law; none: 8000, or 2000.")] = None,
    length: Annotated[int | None, _opt("--length", group=TEST, help="Tokens of one answer; none: 64, or 32.")] = None,
    samples: Annotated[
        int | None, _opt("--samples", group=TEST, help="Short texts a prompt, of the two-sample test; none: 100, or 40.")
    ] = None,
    false_alarm: Annotated[float, _opt("--false-alarm", group=TEST, help="How often a correct engine may fail.")] = 1e-4,
    seed: Annotated[int, _opt("--seed", group=TEST, help="Of all random numbers.")] = 0,
    quick: Annotated[bool, _opt("--quick", group=TEST, help="A quarter of the work: finds coarse errors.")] = False,
    as_json: Annotated[bool, _opt("--json", group=TEST, help="Print one JSON object.")] = False,
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
