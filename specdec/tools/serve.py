"""From options to a running server: bind, resolve, load, serve, in that order, so that cheap errors come first.

Owns: the order of start-up. Must not know: the command line (serve_command.py) or routes (server/).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from socket import socket
from typing import TYPE_CHECKING, Literal

from specdec.errors import ConfigError
from specdec.logging import configure, get_logger

if TYPE_CHECKING:
    from specdec.config.engine import EngineConfig, ResolvedConfig
    from specdec.config.speculative import SpeculativeConfig
    from specdec.metrics.tracing import RequestTracer
    from specdec.server.listen import Tls
    from specdec.server.options import ServerOptions

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationFlags:
    """What the user said about speculation: JSON text, the short flags, or that there should be none."""

    config: str | None = None
    method: str | None = None
    model: str | None = None
    num_tokens: int | None = None
    token_map: str | None = None
    off: bool = False

    @property
    def said(self) -> bool:
        """True when any option asks for a kind of speculation."""
        return any(value is not None for value in (self.config, self.method, self.model, self.num_tokens, self.token_map))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where to listen, how long running requests may take after a stop signal (seconds), and how to log."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # path of a Unix socket, instead of host and port
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    drain_s: float = 30.0
    log_level: str | None = None
    log_format: Literal["text", "json"] = "text"


def serve(engine: EngineConfig, speculation: SpeculationFlags, *, listen: Listen, options: ServerOptions) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: anything the user can mend; raised before the model is loaded wherever that is possible.
    """
    from specdec.server.listen import tls_of, unbind

    configure(listen.log_level, listen.log_format)
    asked = replace(engine, speculative=choose_speculation(speculation, engine.model.model))
    tls = tls_of(listen.ssl_certfile, listen.ssl_keyfile)
    sock = _bind(listen)
    try:
        resolved = _resolve_and_report(asked, said=speculation.said or speculation.off)
        _check_options(options, resolved)
        _load_and_run(resolved, options=options, listen=listen, sock=sock, tls=tls)
    finally:
        unbind(sock, listen.uds)


def _bind(listen: Listen) -> socket:
    from specdec.server.listen import bind, bind_unix

    return bind(listen.host, listen.port) if listen.uds is None else bind_unix(listen.uds)


def _address(sock: socket, *, is_tls: bool) -> str:
    """Return where clients find the server, as a log line shows it."""
    name = sock.getsockname()
    if isinstance(name, str):
        return f"the Unix socket {name}" + (" with TLS" if is_tls else "")
    host, port = name[:2]
    return f"{'https' if is_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def choose_speculation(flags: SpeculationFlags, model: str) -> SpeculativeConfig | None:
    """Return the configuration to draft with, None for plain decoding. Nothing said means the default drafting of `model`.

    Raises:
        ConfigError: a value that cannot be, or --no-speculation beside another flag of speculation.
    """
    from specdec.config.resolve import default_speculative
    from specdec.config.speculative import parse_speculative

    if flags.off and flags.said:
        raise ConfigError("--no-speculation and speculation options are both given", hint="drop one of them")
    if flags.off:
        return None
    if not flags.said:
        return default_speculative(model)
    return parse_speculative(
        flags.config, spec_method=flags.method, spec_model=flags.model, spec_tokens=flags.num_tokens, token_map=flags.token_map
    )


def _resolve_and_report(engine: EngineConfig, *, said: bool) -> ResolvedConfig:
    from specdec.config.report import render
    from specdec.config.resolve import resolve

    resolved = resolve(engine, sources=None if said else {"speculative": "default"})
    logger.info("configuration\n%s", render(resolved.report))
    return resolved


def _check_options(options: ServerOptions, resolved: ResolvedConfig) -> None:
    if options.per_request_spec_decode_metrics != "none" and resolved.traits is None:
        raise ConfigError(
            f"--per-request-spec-decode-metrics is {options.per_request_spec_decode_metrics!r}, but speculation is off",
            hint="drop it, or drop --no-speculation",
        )


def _load_and_run(resolved: ResolvedConfig, *, options: ServerOptions, listen: Listen, sock: socket, tls: Tls | None) -> None:
    from specdec.engine.async_engine import AsyncEngine
    from specdec.engine.core import EngineCore
    from specdec.engine.tokenizer import Tokenizer
    from specdec.server.app import create_app
    from specdec.server.serve import run_server

    tokenizer = Tokenizer.from_resolved(resolved)
    tracer = _tracer(options, resolved)
    core = EngineCore.from_config(resolved)
    if tracer is not None:
        core.trace_with(tracer)
    engine = AsyncEngine(core)
    try:
        app = create_app(engine, tokenizer, resolved, options=options)
        keys = f"clients must send one of {len(options.api_keys)} API keys" if options.api_keys else "no API key is asked for"
        logger.info("serving %s on %s; %s", resolved.served_model_name, _address(sock, is_tls=tls is not None), keys)
        run_server(app, sock=sock, drain_s=listen.drain_s, tls=tls)
    finally:
        engine.close()
        if tracer is not None:
            tracer.close()


def _tracer(options: ServerOptions, resolved: ResolvedConfig) -> RequestTracer | None:
    if options.otlp_traces_endpoint is None:
        return None
    from specdec.metrics.tracing import open_tracer

    return open_tracer(options.otlp_traces_endpoint, model_name=resolved.served_model_name)
