"""POST /v1/chat/completions: messages in, one answer per choice out, whole or as a stream.

Owns: the JSON of chat.completion. Must not know: queues or sockets. Read next: generation.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from specdec.engine.async_engine import OutputStream
from specdec.engine.types import EngineOutput
from specdec.server import admission
from specdec.server.chunks import ChunkWriter, Ending
from specdec.server.context import Job, ServerContext, chat_prompt, make_job, num_choices
from specdec.server.generation import Collected, collect, merged
from specdec.server.logprobs import chat_logprobs, prompt_logprobs
from specdec.server.protocol import ChatBody
from specdec.server.sampling import chat_sampling, constraint_field
from specdec.server.sse import encode
from specdec.server.trace import draft_trace, wants_trace
from specdec.server.usage import cached_tokens, response_metrics, usage

ROLE = '"delta":{"role":"assistant","content":""}'


async def prepare(body: ChatBody, ctx: ServerContext, *, tenant: str) -> Job:
    """Turn a body into engine requests.

    Raises:
        RequestRejected: it cannot be served exactly as asked.
    """
    prompt = await chat_prompt(body, ctx.tokenizer)
    sampling = chat_sampling(body, num_prompt_tokens=len(prompt.token_ids), max_model_len=ctx.resolved.max_model_len)
    admission.check(sampling, ctx.resolved, priority=body.priority or 0)
    sampling = await ctx.engine.with_grammar(sampling, field=constraint_field(body))
    return make_job("chatcmpl", body, (prompt,), samplings=(sampling,), per_prompt=num_choices(body.n), ctx=ctx, tenant=tenant)


async def answer(body: ChatBody, job: Job, streams: Sequence[OutputStream], *, ctx: ServerContext) -> dict[str, Any]:
    """Return the whole answer."""
    choices = await collect(streams)
    members: dict[str, Any] = {
        "id": job.id,
        "object": "chat.completion",
        "created": job.created_s,
        "model": job.model,
        "choices": [_choice(index, choice, body, ctx) for index, choice in enumerate(choices)],
        "usage": _usage(job, sum(len(choice.token_ids) for choice in choices), choices),
    }
    if body.return_token_ids:
        members["prompt_token_ids"] = list(job.prompts[0].token_ids)
    if body.prompt_logprobs is not None:
        members["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_logprobs or (), tokens=ctx.token_texts)
    metrics = response_metrics(choices, job.level, max_nodes=ctx.max_nodes)
    return members if metrics is None else members | {"metrics": metrics}


async def stream(body: ChatBody, job: Job, streams: Sequence[OutputStream], *, ctx: ServerContext) -> AsyncGenerator[bytes, None]:
    """Yield the answer's events: the role of each choice, then one per engine output that has something to show."""
    options = body.stream_options
    has_usage = options is not None and (options.include_usage or options.continuous_usage_stats)
    events = ChunkWriter(job, "chat.completion.chunk", has_usage=has_usage)
    choices = [Collected() for _ in streams]
    has_begun = [False] * len(streams)
    shows_tokens = bool(body.logprobs or body.return_token_ids or wants_trace(body))
    is_plain = not shows_tokens and not has_usage
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
            if not (output.text or output.finish_reason or (output.token_ids and shows_tokens)):
                continue
            more = ""
            if options is not None and options.continuous_usage_stats:
                more = ',"usage":' + encode(_usage(job, num_tokens, choices))
            yield events.chunk(index, _delta(output), logprobs=_logprobs(body, output, ctx), ending=_ending(body, output, ctx), more=more)
    finally:
        await outputs.aclose()
    if options is not None and options.include_usage:
        metrics = response_metrics(choices, job.level, max_nodes=ctx.max_nodes)
        members: dict[str, object] = {"usage": _usage(job, num_tokens, choices)}
        yield events.closing(members if metrics is None else members | {"metrics": metrics})


def _choice(index: int, choice: Collected, body: ChatBody, ctx: ServerContext) -> dict[str, Any]:
    members: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": chat_logprobs(choice.logprobs, tokens=ctx.token_texts) if body.logprobs else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    return members | {"token_ids": choice.token_ids} if body.return_token_ids else members


def _usage(job: Job, num_tokens: int, choices: Sequence[Collected]) -> dict[str, Any]:
    cached = cached_tokens(choices, per_prompt=job.per_prompt)
    return usage(num_prompt_tokens=job.num_prompt_tokens, num_completion_tokens=num_tokens, num_cached_tokens=cached, choices=choices)


def _opening(body: ChatBody, job: Job, output: EngineOutput, ctx: ServerContext) -> str:
    """What the first event of a choice tells of the prompt."""
    members: dict[str, Any] = {}
    if body.return_token_ids:
        members["prompt_token_ids"] = list(job.prompts[0].token_ids)
    if body.prompt_logprobs is not None:
        members["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or (), tokens=ctx.token_texts)
    return "," + encode(members)[1:-1] if members else ""


def _delta(output: EngineOutput) -> str:
    return '"delta":{"content":' + encode(output.text) + "}" if output.text else '"delta":{}'


def _logprobs(body: ChatBody, output: EngineOutput, ctx: ServerContext) -> str:
    return encode(chat_logprobs(output.logprobs or (), tokens=ctx.token_texts)) if body.logprobs else "null"


def _ending(body: ChatBody, output: EngineOutput, ctx: ServerContext) -> Ending:
    extra = ',"token_ids":' + encode(list(output.token_ids)) if body.return_token_ids else ""
    if wants_trace(body):
        extra += ',"specdec":' + encode(draft_trace(output, ctx.token_texts))
    return Ending(encode(output.finish_reason), encode(output.stop_reason), extra)
