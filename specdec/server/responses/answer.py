"""POST /v1/responses: a chat job whose answer is printed as output items, whole or as OpenAI's stream events.

Owns: the response object and its events. Must not know: queues, sockets. Read next: output.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from specdec.engine.async_engine import OutputStream
from specdec.errors import RequestRejected, SpecdecError
from specdec.server import chat
from specdec.server.context import MANY_MESSAGES, Job, ServerContext
from specdec.server.deltas import Deltas
from specdec.server.generation import Collected, merged
from specdec.server.openai_errors import reply_for
from specdec.server.responses.body import ResponsesBody, in_our_words
from specdec.server.responses.output import OutputItems
from specdec.server.sse import encode
from specdec.server.usage import cached_tokens, response_metrics


async def prepare(body: ResponsesBody, ctx: ServerContext, *, tenant: str) -> Job:
    """Turn a body into one engine request.

    Raises:
        RequestRejected: it cannot be served exactly as asked.
    """
    try:
        is_long = isinstance(body.input, list) and len(body.input) > MANY_MESSAGES
        told = await asyncio.to_thread(body.as_chat) if is_long else body.as_chat()
        return await chat.prepare(told, ctx, tenant=tenant)
    except RequestRejected as error:
        raise in_our_words(error) from None


async def answer(body: ResponsesBody, job: Job, streams: Sequence[OutputStream], *, ctx: ServerContext) -> dict[str, Any]:
    """Return the whole response."""
    last: dict[str, Any] = {}
    async for happened in _events(body, job, streams, ctx=ctx):
        last = happened
    response: dict[str, Any] = last["response"]
    return response


async def stream(body: ResponsesBody, job: Job, streams: Sequence[OutputStream], *, ctx: ServerContext) -> AsyncGenerator[bytes, None]:
    """Yield the events of the response, numbered. An error after the first one is told by the event response.failed."""
    number = 0
    events = _events(body, job, streams, ctx=ctx)
    try:
        async for happened in events:
            yield _sse(happened, number)
            number += 1
    except SpecdecError as error:
        if number == 0:
            raise
        reply = reply_for(error)
        fault = {"code": "server_error" if reply.status >= 500 else reply.code or "invalid_prompt", "message": reply.message}
        yield _sse({"type": "response.failed", "response": _response(body, job, ctx, status="failed") | {"error": fault}}, number)
    finally:
        await events.aclose()


async def _events(
    body: ResponsesBody, job: Job, streams: Sequence[OutputStream], *, ctx: ServerContext
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield every event. The first ones wait for the first output, so that an error before it is an ordinary error response."""
    choice, deltas, items = Collected(), Deltas(job.plan, 1), OutputItems()
    has_begun = False
    outputs = merged(streams)
    try:
        async for _, output in outputs:
            if not has_begun:
                has_begun = True
                for name in ("created", "in_progress"):
                    yield {"type": f"response.{name}", "response": _response(body, job, ctx, status="in_progress")}
            choice.count(output)
            choice.token_ids.extend(output.token_ids)
            for happened in items.feed(deltas.pieces(0, output)):
                yield happened
    finally:
        await outputs.aclose()
    is_cut = choice.finish_reason == "length"
    for happened in items.finish(is_cut=is_cut):
        yield happened
    status = "incomplete" if is_cut else "completed"
    response = _response(body, job, ctx, status=status) | {"output": items.items, "usage": _usage(job, choice, items, ctx)}
    if is_cut:
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    metrics = response_metrics([choice], job.level, max_nodes=ctx.max_nodes)
    yield {"type": f"response.{status}", "response": response if metrics is None else response | {"metrics": metrics}}


def _response(body: ResponsesBody, job: Job, ctx: ServerContext, *, status: str) -> dict[str, Any]:
    """The response object before there is output. store is what happens here, whatever was asked."""
    shown = body.model_dump(include={"tools", "tool_choice"}, by_alias=True)
    asked = body.text.format if body.text else None
    text_format = asked.model_dump(by_alias=True, exclude_none=True) if asked else {"type": "text"}
    return {
        "id": "resp_" + job.id.removeprefix("chatcmpl-"),
        "object": "response",
        "created_at": job.created_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": job.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": text_format},
        "tool_choice": shown["tool_choice"] or "auto",
        "tools": shown["tools"] or [],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "system_fingerprint": ctx.fingerprint,
    }


def _usage(job: Job, choice: Collected, items: OutputItems, ctx: ServerContext) -> dict[str, Any]:
    num_output = len(choice.token_ids)
    num_reasoning = min(chat.num_tokens_of(items.reasoning, ctx), num_output)
    return {
        "input_tokens": job.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens([choice], per_prompt=1), "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": job.num_prompt_tokens + num_output,
    }


def _sse(happened: dict[str, Any], number: int) -> bytes:
    """One event with its name, as this API has them."""
    return f"event: {happened['type']}\ndata: {encode(happened | {'sequence_number': number})}\n\n".encode()
