"""create_app: the whole server as one FastAPI application; nothing happens at import.

Owns: how the parts are put together. Must not know: sockets and signals (serve.py). Read next: routes.py.
"""

from __future__ import annotations

import time

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from specdec import __version__
from specdec.config.engine import ResolvedConfig
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.tokenizer import Tokenizer
from specdec.metrics.prometheus import Exporter, Identity
from specdec.server import openai_errors
from specdec.server.context import ServerContext
from specdec.server.guard import ApiKeys, BodyLimit, LastNet
from specdec.server.logprobs import TokenTexts
from specdec.server.options import Lifecycle, ServerOptions
from specdec.server.routes import openai_router, probe_router, token_router


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
    )
    app = FastAPI(title="specdec", version=__version__, redoc_url=None, docs_url=None)
    app.state.lifecycle = ctx.lifecycle
    openai_errors.install(app)
    for router in (openai_router(ctx), token_router(ctx), probe_router(ctx, _exporter(ctx))):
        app.include_router(router)
    _add_layers(app, options)
    return app


def _add_layers(app: FastAPI, options: ServerOptions) -> None:
    """The last one added is the outermost: CORS answers preflights, which bring no key."""
    app.add_middleware(BodyLimit, max_bytes=options.max_body_bytes)
    if options.api_keys:
        app.add_middleware(ApiKeys, keys=options.api_keys)
    app.add_middleware(LastNet)
    if options.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(options.cors_origins), allow_methods=["*"], allow_headers=["*"])


def _exporter(ctx: ServerContext) -> Exporter:
    resolved = ctx.resolved
    identity = Identity(
        model_name=resolved.served_model_name,
        version=__version__,
        method=resolved.traits.method if resolved.traits else "none",
        device=resolved.device,
        dtype=resolved.dtype,
        max_nodes=ctx.max_nodes,
    )
    return Exporter(lambda: ctx.engine.stats, identity, has_vllm_names=ctx.options.metrics_compat == "vllm")
