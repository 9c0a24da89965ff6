"""The routes: bodies to jobs to answers.

Owns: paths, and how a request meets the engine. Must not know: the JSON of answers (completions.py, chat.py).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from specdec import __version__
from specdec.errors import RequestRejected
from specdec.metrics.prometheus import Exporter
from specdec.server import chat, completions
from specdec.server.access import CLIENT_CLOSED
from specdec.server.admission import draft_sources
from specdec.server.context import ServerContext, encode, rendered
from specdec.server.generation import start
from specdec.server.large_bodies import LargeBodyRoute
from specdec.server.openai_errors import ResponseNotStored
from specdec.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from specdec.server.responses import answer as responses
from specdec.server.responses.body import ResponsesBody
from specdec.server.sse import DONE, ClientGone, EventStream, until_client_leaves


def openai_router(ctx: ServerContext) -> APIRouter:
    """Return /v1/completions, /v1/chat/completions, /v1/responses and /v1/models."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=LargeBodyRoute)

    @router.post("/completions", response_model=None)
    async def complete(body: CompletionBody, request: Request) -> Response:
        """Continue a prompt."""
        ctx.require_model(body.model)
        job = await completions.prepare(body, ctx, tenant=_tenant(request))
        streams = start(ctx.engine, job.requests)
        if body.stream:
            return _events(completions.stream(body, job, streams, ctx=ctx), ctx)
        return await _whole(completions.complete(body, job, streams, ctx=ctx), request, ctx)

    @router.post("/chat/completions", response_model=None)
    async def answer(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        ctx.require_model(body.model)
        job = await chat.prepare(body, ctx, tenant=_tenant(request))
        streams = start(ctx.engine, job.requests)
        if body.stream:
            return _events(chat.stream(body, job, streams, ctx=ctx), ctx)
        return await _whole(chat.answer(body, job, streams, ctx=ctx), request, ctx)

    @router.post("/responses", response_model=None)
    async def respond(body: ResponsesBody, request: Request) -> Response:
        """Answer input items with output items. Nothing is stored."""
        ctx.require_model(body.model)
        job = await responses.prepare(body, ctx, tenant=_tenant(request))
        streams = start(ctx.engine, job.requests)
        if body.stream:
            return _events(responses.stream(body, job, streams, ctx=ctx), ctx, done=b"")
        return await _whole(responses.answer(body, job, streams, ctx=ctx), request, ctx)

    @router.get("/responses/{response_id}")
    @router.delete("/responses/{response_id}")
    async def find_response(response_id: str) -> None:
        """Always 404: nothing is stored."""
        raise ResponseNotStored(f"response {response_id[:64]!r} is not here: responses are not stored", hint="keep what you were sent")

    @router.get("/models")
    async def list_models() -> dict[str, Any]:
        """List the one model."""
        return {"object": "list", "data": [_model(ctx)]}

    @router.get("/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, Any]:
        """Describe the one model."""
        ctx.require_model(name)
        return _model(ctx)

    return router


def token_router(ctx: ServerContext) -> APIRouter:
    """Return /tokenize and /detokenize."""
    router = APIRouter(tags=["Tokens"], route_class=LargeBodyRoute)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Return the ids of a prompt or of a conversation."""
        ctx.require_model(body.model)
        token_ids = await _token_ids(body, ctx)
        answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": ctx.resolved.max_model_len, "tokens": list(token_ids)}
        if body.return_token_strs:
            answer["token_strs"] = [ctx.token_texts.text(token_id) for token_id in token_ids]
        return answer

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        """Return the text of token ids."""
        ctx.require_model(body.model)
        bad = next((token_id for token_id in body.tokens if not 0 <= token_id < ctx.resolved.vocab_size), None)
        if bad is not None:
            raise RequestRejected(f"tokens holds token id {bad}, but ids are 0..{ctx.resolved.vocab_size - 1}", param="tokens")
        return {"prompt": ctx.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)}

    return router


def probe_router(ctx: ServerContext, exporter: Exporter) -> APIRouter:
    """Return /health, /ready, /version and /metrics."""
    router = APIRouter(tags=["Probes"])

    @router.get("/health", response_model=None)
    async def health() -> JSONResponse:
        """200 while steps end; 503 when the engine is dead, or has work and ended no step for stall_after_s (with all states then)."""
        fault = ctx.watchdog.fault()
        states = {"requests": ctx.watchdog.states()} if fault else {}
        return JSONResponse({"status": fault or "ok", **_what_runs(ctx), **states}, status_code=503 if fault else 200)

    @router.get("/ready", response_model=None)
    async def ready() -> JSONResponse:
        """200 while new requests are taken; 503 from the start of a drain on, and while the engine sleeps."""
        fault = ctx.watchdog.fault() or ("the server is shutting down" if ctx.lifecycle.draining else None)
        fault = fault or (None if ctx.engine.takes_requests else "the engine sleeps")
        return JSONResponse({"status": fault or "ready"}, status_code=503 if fault else 200)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of specdec."""
        return {"version": __version__}

    @router.get("/metrics", response_model=None)
    async def metrics(request: Request) -> Response:
        """Return all metrics for Prometheus."""
        body, content_type = exporter.render(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    return router


def _events(events: AsyncGenerator[bytes, None], ctx: ServerContext, *, done: bytes = DONE) -> EventStream:
    return EventStream(events, lifecycle=ctx.lifecycle, timeout_s=ctx.options.request_timeout_s, done=done)


async def _whole(work: Any, request: Request, ctx: ServerContext) -> Response:
    timeout_s = ctx.options.request_timeout_s
    try:
        return JSONResponse(await until_client_leaves(work, request, lifecycle=ctx.lifecycle, timeout_s=timeout_s))
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED)


async def _token_ids(body: TokenizeBody, ctx: ServerContext) -> tuple[int, ...]:
    if body.prompt is not None:
        return await encode(body.prompt, ctx.tokenizer, add_special_tokens=body.add_special_tokens)
    text = await rendered(
        body.messages or (),
        ctx,
        tools=body.tool_use.for_template(),
        add_generation_prompt=body.add_generation_prompt,
        template_kwargs=body.chat_template_kwargs,
    )
    return await encode(text, ctx.tokenizer, add_special_tokens=False)


def _tenant(request: Request) -> str:
    """The digest that ApiKeys left; "" without keys."""
    return str(request.scope.get("state", {}).get("tenant", ""))


def _model(ctx: ServerContext) -> dict[str, Any]:
    return {
        "id": ctx.resolved.served_model_name,
        "object": "model",
        "created": ctx.created_s,
        "owned_by": "specdec",
        "root": ctx.resolved.engine.model.model,
        "max_model_len": ctx.resolved.max_model_len,
    }


def _what_runs(ctx: ServerContext) -> dict[str, Any]:
    """What was chosen at start, so that nobody measures another thing than they think."""
    resolved = ctx.resolved
    return {
        "model": resolved.served_model_name,
        "device": resolved.device,
        "dtype": resolved.dtype,
        "speculation": {"sources": list(draft_sources(resolved)), "num_speculative_tokens": ctx.max_nodes} if resolved.traits else None,
        "num_unfinished_requests": ctx.engine.num_unfinished,
    }
