"""specdec serve: its options, and the configuration they make.

Owns: names, groups and help of the options of the server. Must not know: what the engine does with them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specdec.errors import ConfigError
from specdec.tools.options import CACHE, EXECUTION, MODEL, SCHEDULER, SERVER, SPECULATION, opt

if TYPE_CHECKING:
    from specdec.tools.serve import SpeculationFlags


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


def serve(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Directory, .gguf file or hub id; none: SmolLM2-135M-Instruct, embedded.", show_default=False),
    ] = None,
    model_option: Annotated[str | None, opt("--model", group=MODEL, help="The same as MODEL, as vLLM spells it.")] = None,
    served_model_name: Annotated[str | None, opt("--served-model-name", group=MODEL, help="Name in the API and in metric labels.")] = None,
    tokenizer: Annotated[str | None, opt("--tokenizer", group=MODEL, help="Directory or hub id, when it is not the model's own.")] = None,
    revision: Annotated[str | None, opt("--revision", group=MODEL, help="Branch, tag or commit of a hub id.")] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        opt("--dtype", group=MODEL, help="auto: bfloat16 where the device is fast at it."),
    ] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], opt("--device", group=MODEL, help="auto: a GPU when there is one.")] = "auto",
    max_model_len: Annotated[
        int | None, opt("--max-model-len", group=MODEL, help="Tokens of prompt and answer; at most the model's.")
    ] = None,
    seed: Annotated[int, opt("--seed", group=MODEL, help="Seed of requests that bring none.")] = 0,
    trust_remote_code: Annotated[bool, opt("--trust-remote-code", group=MODEL, help="Run Python code found in the checkpoint.")] = False,
    block_size: Annotated[int, opt("--block-size", group=CACHE, help="Tokens in one KV block.")] = 16,
    num_blocks: Annotated[
        int | None, opt("--num-blocks", "--num-gpu-blocks-override", group=CACHE, help="KV blocks; none: from --memory-fraction.")
    ] = None,
    memory_fraction: Annotated[
        float | None,
        opt("--memory-fraction", "--gpu-memory-utilization", group=CACHE, help="None: 0.9 of a GPU, 0.3 of free memory on a CPU."),
    ] = None,
    enable_prefix_caching: Annotated[
        bool, opt("--enable-prefix-caching/--no-enable-prefix-caching", group=CACHE, help="Reuse the KV of equal prompt starts.")
    ] = True,
    max_num_seqs: Annotated[int, opt("--max-num-seqs", group=SCHEDULER, help="Requests that run at once.")] = 64,
    max_num_batched_tokens: Annotated[
        int, opt("--max-num-batched-tokens", group=SCHEDULER, help="Tokens of one step, drafts included.")
    ] = 2048,
    long_prefill_token_threshold: Annotated[
        int, opt("--long-prefill-token-threshold", group=SCHEDULER, help="Most prompt tokens one request reads in a step; 0: no limit.")
    ] = 0,
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], opt("--scheduling-policy", group=SCHEDULER, help="Who runs first when not all can.")
    ] = "fcfs",
    max_waiting: Annotated[int, opt("--max-waiting", group=SCHEDULER, help="Requests that may wait; more get 429. 0: no limit.")] = 1024,
    async_scheduling: Annotated[
        bool, opt("--async-scheduling/--no-async-scheduling", group=SCHEDULER, help="Plan a step while the one before runs.")
    ] = True,
    enforce_eager: Annotated[bool, opt("--enforce-eager", group=EXECUTION, help="Capture no CUDA graphs.")] = False,
    cudagraph_capture_sizes: Annotated[
        str | None,
        opt(
            "--cudagraph-capture-sizes",
            "--cuda-graph-sizes",
            group=EXECUTION,
            help="Query rows of the steps to capture as CUDA graphs, separated by commas.",
        ),
    ] = None,
    attention_backend: Annotated[
        str, opt("--attention-backend", group=EXECUTION, help="auto, triton, sdpa or flashinfer, or vLLM's name of it; GPUs only.")
    ] = "auto",
    speculative_config: Annotated[
        str | None,
        opt("--speculative-config", "-sc", group=SPECULATION, help="JSON with vLLM's keys; also --speculative-config.KEY VALUE."),
    ] = None,
    spec_method: Annotated[str | None, opt("--spec-method", group=SPECULATION, help="Short for the key method.")] = None,
    spec_model: Annotated[str | None, opt("--spec-model", group=SPECULATION, help="Short for the key model.")] = None,
    spec_tokens: Annotated[int | None, opt("--spec-tokens", group=SPECULATION, help="Short for the key num_speculative_tokens.")] = None,
    speculative_token_map: Annotated[
        str | None, opt("--speculative-token-map", group=SPECULATION, help="Short for the key token_map: file of the ids a head scores.")
    ] = None,
    suffix_corpus: Annotated[
        list[str] | None,
        opt("--suffix-corpus", group=SPECULATION, help="Text or .jsonl file that suffix drafting learns at start; may be repeated."),
    ] = None,
    suffix_share_responses: Annotated[
        bool,
        opt(
            "--suffix-share-responses",
            group=SPECULATION,
            help="Let suffix drafting learn from every client's responses; timing may then tell of another's text.",
        ),
    ] = False,
    no_speculation: Annotated[bool, opt("--no-speculation", group=SPECULATION, help="Decode plainly, one token a step.")] = False,
    host: Annotated[str, opt("--host", group=SERVER, help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, opt("--port", group=SERVER, help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8000,
    uds: Annotated[str | None, opt("--uds", group=SERVER, help="Path of a Unix socket to listen on, instead of host and port.")] = None,
    ssl_certfile: Annotated[str | None, opt("--ssl-certfile", group=SERVER, help="PEM certificate chain: serve HTTPS.")] = None,
    ssl_keyfile: Annotated[str | None, opt("--ssl-keyfile", group=SERVER, help="PEM key of the certificate, without passphrase.")] = None,
    api_key: Annotated[list[str] | None, opt("--api-key", group=SERVER, help="Key that clients must send; may be repeated.")] = None,
    api_key_file: Annotated[
        str | None, opt("--api-key-file", group=SERVER, help="More keys, one a line; also $SPECDEC_API_KEYS, separated by spaces.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, opt("--cors-origin", group=SERVER, help="Origin that browsers may call from; may be repeated.")
    ] = None,
    max_body_bytes: Annotated[int, opt("--max-body-bytes", group=SERVER, help="Largest request body.")] = 16 * 1024 * 1024,
    metrics_compat: Annotated[
        Literal["none", "vllm"], opt("--metrics-compat", group=SERVER, help="vllm: also export vLLM's metric names.")
    ] = "none",
    per_request_spec_decode_metrics: Annotated[
        Literal["none", "summary", "detailed"],
        opt("--per-request-spec-decode-metrics", group=SERVER, help="Speculation figures in each response."),
    ] = "none",
    enable_auto_tool_choice: Annotated[
        bool,
        opt("--enable-auto-tool-choice/--no-enable-auto-tool-choice", group=SERVER, help="Let the model decide to call a request's tools."),
    ] = True,
    tool_call_parser: Annotated[
        str, opt("--tool-call-parser", group=SERVER, help="auto (from the chat template), hermes, llama3_json, mistral.")
    ] = "auto",
    reasoning_parser: Annotated[
        str | None, opt("--reasoning-parser", group=SERVER, help="Tell <think> from content: qwen3 or deepseek_r1; none: all is content.")
    ] = None,
    enable_sleep_mode: Annotated[
        bool, opt("--enable-sleep-mode", group=SERVER, help="Serve /sleep, /wake_up and /reload_weights; needs an API key.")
    ] = False,
    otlp_traces_endpoint: Annotated[
        str | None, opt("--otlp-traces-endpoint", group=SERVER, help="URL to send OpenTelemetry traces to; needs specdec[otel].")
    ] = None,
    ui: Annotated[bool, opt("--ui/--no-ui", group=SERVER, help="Serve the playground at /.")] = True,
    request_timeout: Annotated[
        float | None, opt("--request-timeout", group=SERVER, help="Seconds that a body, and then an answer, may take; none: no limit.")
    ] = None,
    stall_seconds: Annotated[
        float, opt("--stall-seconds", group=SERVER, help="/health turns red when work waits and no step ended for so long.")
    ] = 60.0,
    drain_seconds: Annotated[float, opt("--drain-seconds", group=SERVER, help="Time running requests get after SIGTERM.", min=0)] = 30.0,
    log_level: Annotated[
        str | None, opt("--log-level", group=SERVER, help="DEBUG, INFO, WARNING, ERROR; none: $SPECDEC_LOG_LEVEL or INFO.")
    ] = None,
    log_format: Annotated[Literal["text", "json"], opt("--log-format", group=SERVER, help="One line an event, as text or JSON.")] = "text",
    config: Annotated[  # noqa: ARG001 - read by its callback, before the other options
        str | None,
        opt("--config", group=SERVER, help="YAML file of options; the command line wins.", is_eager=True, callback=_read_config_file),
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
