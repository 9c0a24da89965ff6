"""POST /v1/chat/completions: messages in, one answer per choice out, whole or as a stream.

Owns: the JSON of chat.completion. Must not know: queues or sockets. Read next: generation.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from specdec.engine.async_engine import OutputStream
from specdec.engine.types import EngineOutput
from specdec.server import admission
from specdec.server.answers.message import Message, finish_reason, message_json, read_whole
from specdec.server.answers.plan import plan_for
from specdec.server.answers.reader import AnswerPlan
from specdec.server.chunks import ChunkWriter, Ending
from specdec.server.context import Job, ServerContext, chat_prompt, make_job, num_choices
from specdec.server.deltas import Deltas
from specdec.server.generation import Collected, collect, merged
from specdec.server.logprobs import chat_logprobs, prompt_logprobs
from specdec.server.protocol import ChatBody
from specdec.server.sampling import chat_sampling, constraint_field, structured_params
from specdec.server.sse import encode
from specdec.server.trace import draft_trace, wants_trace
from specdec.server.usage import cached_tokens, response_metrics, transfer_params, usage

ROLE = '"delta":{"role":"assistant","content":""}'


async def prepare(body: ChatBody, ctx: ServerContext, *, tenant: str) -> Job:
    """Turn a body into engine requests.

    Raises:
        RequestRejected: it cannot be served exactly as asked.
    """
    prompt = await chat_prompt(body, ctx)
    plan = plan_for(
        body.tool_use,
        prompt.text or "",
        formats=ctx.formats,
        constraint=constraint_field(body) if structured_params(body) is not None else None,
        shows_reasoning=body.include_reasoning is not False,
    )
    sampling = chat_sampling(body, num_prompt_tokens=len(prompt.token_ids), max_model_len=ctx.resolved.max_model_len)
    if any(ctx.tokenizer.is_special(marker) for marker in plan.markers):  # decoding must not leave out what calls are known by
        sampling = replace(sampling, skip_special_tokens=False)
    admission.check(sampling, ctx.resolved, priority=body.priority or 0)
    sampling = await ctx.engine.with_grammar(sampling, field=constraint_field(body))
    job = make_job("chatcmpl", body, (prompt,), samplings=(sampling,), per_prompt=num_choices(body.n), ctx=ctx, tenant=tenant)
    return replace(job, plan=plan)


async def answer(body: ChatBody, job: Job, streams: Sequence[OutputStream], *, ctx: ServerContext) -> dict[str, Any]:
    """Return the whole answer."""
    choices = await collect(streams)
    messages = [read_whole(choice.text, job.plan) for choice in choices]
    members: dict[str, Any] = {
        "id": job.id,
        "object": "chat.completion",
        "created": job.created_s,
        "model": job.model,
        "system_fingerprint": job.fingerprint,
        "choices": [
            _choice(index, choice, message, body=body, plan=job.plan, ctx=ctx)
            for index, (choice, message) in enumerate(zip(choices, messages, strict=True))
        ],
        "usage": _usage(job, sum(len(choice.token_ids) for choice in choices), choices, messages=messages, ctx=ctx),
    }
    if body.return_token_ids:
        members["prompt_token_ids"] = list(job.prompts[0].token_ids)
    if body.prompt_logprobs is not None:
        members["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_logprobs or (), tokens=ctx.token_texts)
    members |= transfer_params([request.request_id for request in job.requests], ctx.resolved.engine.speculative)
    metrics = response_metrics(choices, job.level, max_nodes=ctx.max_nodes)
    return members if metrics is None else members | {"metrics": metrics}


async def stream(body: ChatBody, job: Job, streams: Sequence[OutputStream], *, ctx: ServerContext) -> AsyncGenerator[bytes, None]:
    """Yield the answer's events: the role of each choice, then one per engine output that has something to show."""
    options = body.stream_options
    has_usage = options is not None and (options.include_usage or options.continuous_usage_stats)
    events = ChunkWriter(job, "chat.completion.chunk", has_usage=has_usage)
    choices = [Collected() for _ in streams]
    deltas = Deltas(job.plan, len(streams))
    has_begun = [False] * len(streams)
    shows_tokens = bool(body.logprobs or body.return_token_ids or wants_trace(body))
    is_plain = job.plan.is_plain and not shows_tokens and not has_usage
    num_tokens = 0
    outputs = merged(streams)
    try:
        async for index, output in outputs:
            choices[index].count(output)
            num_tokens += len(output.token_ids)
            if not has_begun[index]:
                has_begun[index] = True
                yield events.chunk(index, ROLE, more=_opening(body, job, output, ctx))
            if is_plain and output.finish_reason is None:  # the hot path
                if output.text:
                    yield events.chunk(index, '"delta":{"content":' + encode(output.text) + "}")
                continue
            delta = deltas.of(index, output)
            if not (delta or output.finish_reason or (output.token_ids and shows_tokens)):
                continue
            more = ""
            if options is not None and options.continuous_usage_stats:
                more = ',"usage":' + encode(_usage(job, num_tokens, choices, messages=deltas.messages, ctx=ctx))
            ending = _ending(body, output, ctx, reason=deltas.finish_reason(index, output))
            yield events.chunk(index, '"delta":' + encode(delta), logprobs=_logprobs(body, output, ctx), ending=ending, more=more)
    finally:
        await outputs.aclose()
    if options is not None and options.include_usage:
        metrics = response_metrics(choices, job.level, max_nodes=ctx.max_nodes)
        members: dict[str, object] = {"usage": _usage(job, num_tokens, choices, messages=deltas.messages, ctx=ctx)}
        yield events.closing(members if metrics is None else members | {"metrics": metrics})


def _choice(index: int, choice: Collected, message: Message, *, body: ChatBody, plan: AnswerPlan, ctx: ServerContext) -> dict[str, Any]:
    members: dict[str, Any] = {
        "index": index,
        "message": message_json(message, plan),
        "logprobs": chat_logprobs(choice.logprobs, tokens=ctx.token_texts) if body.logprobs else None,
        "finish_reason": finish_reason(choice.finish_reason, plan, has_calls=bool(message.calls)),
        "stop_reason": choice.stop_reason,
    }
    return members | {"token_ids": choice.token_ids} if body.return_token_ids else members


def _usage(job: Job, num_tokens: int, choices: Sequence[Collected], *, messages: Sequence[Message], ctx: ServerContext) -> dict[str, Any]:
    figures = usage(
        num_prompt_tokens=job.num_prompt_tokens,
        num_completion_tokens=num_tokens,
        num_cached_tokens=cached_tokens(choices, per_prompt=job.per_prompt),
        choices=choices,
    )
    if not job.plan.reads_reasoning:
        return figures
    num_reasoning = min(sum(num_tokens_of(message.reasoning, ctx) for message in messages), num_tokens)
    return figures | {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}


def num_tokens_of(text: str, ctx: ServerContext) -> int:
    """Return how many tokens a part of an answer has, counted from its text: a step may hold tokens of two parts."""
    return len(ctx.tokenizer.encode(text, add_special_tokens=False)) if text else 0


def _opening(body: ChatBody, job: Job, output: EngineOutput, ctx: ServerContext) -> str:
    """What the first event of a choice tells of the prompt."""
    members: dict[str, Any] = {}
    if body.return_token_ids:
        members["prompt_token_ids"] = list(job.prompts[0].token_ids)
    if body.prompt_logprobs is not None:
        members["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or (), tokens=ctx.token_texts)
    return "," + encode(members)[1:-1] if members else ""


def _logprobs(body: ChatBody, output: EngineOutput, ctx: ServerContext) -> str:
    return encode(chat_logprobs(output.logprobs or (), tokens=ctx.token_texts)) if body.logprobs else "null"


def _ending(body: ChatBody, output: EngineOutput, ctx: ServerContext, *, reason: str | None) -> Ending:
    extra = ',"token_ids":' + encode(list(output.token_ids)) if body.return_token_ids else ""
    if wants_trace(body):
        extra += ',"specdec":' + encode(draft_trace(output, ctx.token_texts))
    return Ending(encode(reason), encode(output.stop_reason), extra)
