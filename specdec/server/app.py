"""create_app: the whole server as one FastAPI application; nothing happens at import.

Owns: how the parts are put together. Must not know: sockets and signals (serve.py). Read next: routes.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Lifespan

from specdec import __version__
from specdec.config.engine import ResolvedConfig
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.self_test import SelfTest
from specdec.engine.tokenizer import Tokenizer
from specdec.metrics.prometheus import Exporter, Identity
from specdec.server import openai_errors
from specdec.server.access import Access, HttpCounts
from specdec.server.answers.formats import AnswerFormats, formats_for
from specdec.server.context import ServerContext, fingerprint
from specdec.server.corpora import corpora_router
from specdec.server.guard import OPEN_PATHS, ApiKeys, BodyLimit, LastNet
from specdec.server.logprobs import TokenTexts
from specdec.server.options import Lifecycle, ServerOptions
from specdec.server.playground import assets, playground_router
from specdec.server.routes import openai_router, probe_router, token_router
from specdec.server.trace_context import TraceContext
from specdec.server.watchdog import Watchdog
from specdec.server.weights import weights_router


def create_app(engine: AsyncEngine, tokenizer: Tokenizer, resolved: ResolvedConfig, *, options: ServerOptions | None = None) -> FastAPI:
    """Return the application. The caller owns the engine and closes it after the server has stopped.

    `app.state.lifecycle` is what `run_server` tells of a shutdown.
    """
    options = options or ServerOptions()
    ctx = ServerContext(
        engine=engine,
        tokenizer=tokenizer,
        resolved=resolved,
        options=options,
        lifecycle=Lifecycle(),
        created_s=int(time.time()),
        token_texts=TokenTexts(tokenizer),
        watchdog=Watchdog(engine, stall_after_s=options.stall_after_s),
        formats=_formats(tokenizer, resolved, options),
        fingerprint=fingerprint(resolved),
    )
    app = FastAPI(
        title="specdec",
        version=__version__,
        redoc_url=None,
        docs_url=None,
        lifespan=_beside(ctx.watchdog.run, SelfTest(engine, tokenizer, resolved).run),
    )
    app.state.lifecycle = ctx.lifecycle
    openai_errors.install(app)
    counts = HttpCounts(resolved.served_model_name)
    for router in (openai_router(ctx), token_router(ctx), corpora_router(ctx), probe_router(ctx, _exporter(ctx, counts))):
        app.include_router(router)
    if options.enable_sleep_mode:
        app.include_router(weights_router(ctx))
    files = assets() if options.has_ui else {}
    if files:
        app.include_router(playground_router(ctx, files))
    _add_layers(app, options, counts=counts, open_paths=OPEN_PATHS | files.keys())
    return app


def _formats(tokenizer: Tokenizer, resolved: ResolvedConfig, options: ServerOptions) -> AnswerFormats:
    return formats_for(
        parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        may_choose=options.enable_auto_tool_choice,
        template=tokenizer.chat_template,
        model_type=str(getattr(resolved.hf_config, "model_type", "")),
    )


def _add_layers(app: FastAPI, options: ServerOptions, *, counts: HttpCounts, open_paths: Collection[str]) -> None:
    """The last one added is the outermost. CORS answers preflights, which bring no key; all that is answered is counted."""
    if options.otlp_traces_endpoint is not None:
        app.add_middleware(TraceContext)
    app.add_middleware(BodyLimit, max_bytes=options.max_body_bytes, timeout_s=options.request_timeout_s)
    if options.api_keys:
        app.add_middleware(ApiKeys, keys=options.api_keys, open_paths=open_paths)
    app.add_middleware(LastNet)
    if options.cors_origins:
        origins, exposed = list(options.cors_origins), ["X-Request-Id"]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed)
    app.add_middleware(Access, counts=counts)


def _beside(*jobs: Callable[[], Coroutine[Any, Any, None]]) -> Lifespan[FastAPI]:
    """Jobs that run beside the server for as long as it does, or until they are done."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(job()) for job in jobs]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return lifespan


def _exporter(ctx: ServerContext, counts: HttpCounts) -> Exporter:
    resolved = ctx.resolved
    identity = Identity(
        model_name=resolved.served_model_name,
        version=__version__,
        method=resolved.traits.method if resolved.traits else "none",
        device=resolved.device,
        dtype=resolved.dtype,
        max_nodes=ctx.max_nodes,
    )
    return Exporter(lambda: ctx.engine.stats, identity, has_vllm_names=ctx.options.metrics_compat == "vllm", more=(counts,))
