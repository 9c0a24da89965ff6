"""ServerContext: what every route needs, passed to it and held in no global.

Owns: the record, model names, and prompts as token ids. Must not know: the JSON of any answer.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from specdec import __version__
from specdec.config.engine import ResolvedConfig
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.tokenizer import Tokenizer
from specdec.engine.types import EngineRequest
from specdec.errors import RequestRejected
from specdec.sampling_params import SamplingParams
from specdec.server.answers.formats import AnswerFormats
from specdec.server.answers.reader import PLAIN, AnswerPlan
from specdec.server.answers.tools import told_in_messages
from specdec.server.generation import require_capacity
from specdec.server.logprobs import TokenTexts
from specdec.server.openai_errors import ContextLengthExceeded, ModelNotFound
from specdec.server.options import Lifecycle, ServerOptions, SpecMetricsLevel
from specdec.server.protocol import ChatBody, ChatMessage, CompletionBody, GenerationBody
from specdec.server.sampling import require_unicode, room_for
from specdec.server.trace import wants_trace
from specdec.server.trace_context import trace_parent
from specdec.server.watchdog import Watchdog

LONG_TEXT = 20_000  # characters; a longer prompt is rendered and tokenized on a thread, so that streams of others go on
MANY_MESSAGES = 100  # the same for messages, which cost some 20 microseconds each


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """The engine and everything said at start. created_s: Unix time, for /v1/models."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    resolved: ResolvedConfig
    options: ServerOptions
    lifecycle: Lifecycle
    created_s: int
    token_texts: TokenTexts
    watchdog: Watchdog
    formats: AnswerFormats
    fingerprint: str

    @property
    def max_nodes(self) -> int:
        """Drafts per step at most; 0 without speculation."""
        return self.resolved.traits.max_nodes if self.resolved.traits else 0

    def require_model(self, name: str | None) -> None:
        """Raise ModelNotFound unless `name` is ours or left out."""
        served = self.resolved.served_model_name
        if name is not None and name != served:
            raise ModelNotFound(f"model is {name[:200]!r}, but this server has {served!r} only", hint="GET /v1/models lists it")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. text is None where the client sent ids."""

    token_ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One accepted body: its prompts, and the engine requests of all choices, prompt by prompt, `per_prompt` each."""

    id: str
    created_s: int
    model: str
    prompts: tuple[Prompt, ...]
    requests: tuple[EngineRequest, ...]
    per_prompt: int
    level: SpecMetricsLevel
    fingerprint: str
    plan: AnswerPlan = PLAIN

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many choices it has."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def prompt_of(self, index: int) -> Prompt:
        """Return the prompt of a choice."""
        return self.prompts[index // self.per_prompt]


async def completion_prompts(body: CompletionBody, ctx: ServerContext) -> tuple[Prompt, ...]:
    """Return the prompts of a completion body; add_special_tokens False leaves the model's opening tokens out.

    Raises:
        RequestRejected: a text is no Unicode or far too long, or there are more prompts than the engine ever holds.
    """
    raw, tokenizer = body.prompt, ctx.tokenizer
    items: Sequence[str | list[int] | int] = [raw] if isinstance(raw, str) else raw
    if isinstance(items[0], int):
        require_may_fit(items, ctx, param="prompt")
        return (Prompt(tuple(token_id for token_id in items if isinstance(token_id, int))),)
    special = body.add_special_tokens is not False
    require_capacity(ctx.engine, len(items))
    prompts: list[Prompt] = []
    for item in items:
        if not isinstance(item, int):
            require_may_fit(item, ctx, param="prompt")
            prompts.append(await _prompt(item, tokenizer, special=special))
            await asyncio.sleep(0)  # many short texts are as much work as a long one
    return tuple(prompts)


def require_may_fit(text: str | Sequence[object], ctx: ServerContext, *, param: str) -> None:
    """Refuse ids that fill the context, and a text that has too many characters for it whatever its tokens are, before they cost seconds.

    Raises:
        ContextLengthExceeded: it is too long.
    """
    limit, longest = ctx.resolved.max_model_len, ctx.tokenizer.max_chars_per_token
    if not isinstance(text, str):
        room_for(len(text), max_model_len=limit, param=param)
    elif longest is not None and len(text) > limit * longest:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {limit} tokens, but the prompt has {len(text)} characters, "
            f"which are at least {-(-len(text) // longest)} tokens",
            param=param,
            hint="send a shorter prompt",
        )


async def _prompt(item: str | list[int], tokenizer: Tokenizer, *, special: bool) -> Prompt:
    if isinstance(item, list):
        return Prompt(tuple(item))
    return Prompt(await encode(item, tokenizer, add_special_tokens=special), item)


async def encode(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> tuple[int, ...]:
    """Return the ids of a prompt.

    Raises:
        RequestRejected: the text is not Unicode.
    """
    require_unicode("prompt", text)
    if len(text) < LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


async def chat_prompt(body: ChatBody, ctx: ServerContext) -> Prompt:
    """Return a conversation in the model's own format, its tools included."""
    text = await rendered(
        body.messages,
        ctx,
        tools=body.tool_use.for_template(),
        add_generation_prompt=body.add_generation_prompt is not False,
        template_kwargs=body.chat_template_kwargs,
    )
    require_may_fit(text, ctx, param="messages")
    return Prompt(await encode(text, ctx.tokenizer, add_special_tokens=bool(body.add_special_tokens)), text)


async def rendered(
    messages: Sequence[ChatMessage],
    ctx: ServerContext,
    *,
    tools: Sequence[dict[str, Any]],
    add_generation_prompt: bool,
    template_kwargs: dict[str, Any] | None,
) -> str:
    """Return the prompt text. A template that knows no tools gets them, calls and their results as text.

    Raises:
        RequestRejected: a text is no Unicode, or the template refuses the messages.
    """
    is_long = len(messages) > MANY_MESSAGES or sum(len(message.content or "") for message in messages) > LONG_TEXT
    given = (messages, ctx, tools, add_generation_prompt, template_kwargs)
    return await asyncio.to_thread(_render, *given) if is_long else _render(*given)


def _render(
    messages: Sequence[ChatMessage],
    ctx: ServerContext,
    tools: Sequence[dict[str, Any]],
    add_generation_prompt: bool,
    template_kwargs: dict[str, Any] | None,
) -> str:
    for message in messages:
        require_unicode("messages", message.content or "")
    told = [message.for_template() for message in messages]
    if not ctx.formats.template_has_tools and (tools or any("tool_calls" in message or message["role"] == "tool" for message in told)):
        told, tools = told_in_messages(told, tools), ()
    return ctx.tokenizer.render_chat(told, tools=tools, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs)


def make_job(
    kind: str,
    body: GenerationBody,
    prompts: Sequence[Prompt],
    *,
    samplings: Sequence[SamplingParams],
    per_prompt: int,
    ctx: ServerContext,
    tenant: str,
) -> Job:
    """Fan prompts out into engine requests: `per_prompt` choices each, choice i drawn with seed + i."""
    level = body.per_request_spec_decode_metrics or ctx.options.per_request_spec_decode_metrics
    name = f"{kind}-{body.request_id or uuid.uuid4().hex}"
    now_s = time.monotonic()
    num_requests = len(prompts) * per_prompt
    requests = [
        EngineRequest(
            request_id=name if num_requests == 1 else f"{name}-{index}",
            prompt_token_ids=prompts[index // per_prompt].token_ids,
            sampling=_with_seed(samplings[index // per_prompt], index % per_prompt),
            arrival_s=now_s,
            priority=body.priority or 0,
            tenant=tenant,
            track_drafts=wants_trace(body) or (level == "detailed" and num_requests == 1),
            trace_parent=trace_parent(),
        )
        for index in range(num_requests)
    ]
    return Job(
        id=name,
        created_s=int(time.time()),
        model=ctx.resolved.served_model_name,
        prompts=tuple(prompts),
        requests=tuple(requests),
        per_prompt=per_prompt,
        level=level,
        fingerprint=ctx.fingerprint,
    )


def num_choices(n: int | None) -> int:
    """Return n, or 1 where it is left out.

    Raises:
        RequestRejected: out of range.
    """
    count = 1 if n is None else n
    if not 1 <= count <= 128:
        raise RequestRejected(f"n is {count}, but it must be in 1..128", param="n")
    return count


def _with_seed(sampling: SamplingParams, offset: int) -> SamplingParams:
    if sampling.seed is None or offset == 0:
        return sampling
    seed = sampling.seed + offset
    return replace(sampling, seed=seed if seed < 2**64 else seed - 2**64)


def fingerprint(resolved: ResolvedConfig) -> str:
    """Return OpenAI's system_fingerprint: equal for servers that give a seeded request the same answer."""
    what = (__version__, resolved.engine, resolved.dtype, resolved.device, resolved.max_model_len)
    return f"fp_{sha256(repr(what).encode(errors='replace')).hexdigest()[:10]}"
