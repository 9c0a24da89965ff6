"""POST /v1/completions: prompts in, text out, whole or as a stream.

Owns: the JSON of text_completion, echo and best_of. Must not know: queues or sockets.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.engine.async_engine import OutputStream
from specdec.engine.types import EngineOutput
from specdec.scheduler.output import TokenLogprobs
from specdec.server import admission
from specdec.server.chunks import ChunkWriter, Ending
from specdec.server.context import Job, ServerContext, completion_prompts, make_job, num_choices
from specdec.server.generation import Collected, collect, merged, require_capacity
from specdec.server.logprobs import completion_logprobs, prompt_logprobs
from specdec.server.protocol import CompletionBody
from specdec.server.sampling import completion_sampling, constraint_field
from specdec.server.sse import encode
from specdec.server.trace import draft_trace, wants_trace
from specdec.server.usage import cached_tokens, response_metrics, transfer_params, usage


async def prepare(body: CompletionBody, ctx: ServerContext, *, tenant: str) -> Job:
    """Turn a body into engine requests.

    Raises:
        RequestRejected: it cannot be served exactly as asked.
    """
    per_prompt = max(num_choices(body.n), body.best_of or 1)
    prompts = await completion_prompts(body, ctx)
    require_capacity(ctx.engine, len(prompts) * per_prompt)
    samplings = []
    for prompt in prompts:
        sampling = completion_sampling(body, num_prompt_tokens=len(prompt.token_ids), max_model_len=ctx.resolved.max_model_len)
        admission.check(sampling, ctx.resolved, priority=body.priority or 0)
        samplings.append(await ctx.engine.with_grammar(sampling, field=constraint_field(body)))
    return make_job("cmpl", body, prompts, samplings=samplings, per_prompt=per_prompt, ctx=ctx, tenant=tenant)


async def complete(body: CompletionBody, job: Job, streams: Sequence[OutputStream], *, ctx: ServerContext) -> dict[str, Any]:
    """Return the whole answer."""
    candidates = await collect(streams)
    n = num_choices(body.n)
    writer = _ChoiceWriter(body, job, ctx)
    choices: list[dict[str, Any]] = []
    for index in _best(candidates, n, per_prompt=job.per_prompt):
        choices.append({"index": len(choices), **writer.whole(index, candidates[index])})
    num_tokens = 0 if body.max_tokens == 0 else sum(len(choice.token_ids) for choice in candidates)
    answer: dict[str, Any] = {
        "id": job.id,
        "object": "text_completion",
        "created": job.created_s,
        "model": job.model,
        "system_fingerprint": job.fingerprint,
        "choices": choices,
        "usage": usage(
            num_prompt_tokens=job.num_prompt_tokens,
            num_completion_tokens=num_tokens,
            num_cached_tokens=cached_tokens(candidates, per_prompt=job.per_prompt),
            choices=candidates,
        ),
    }
    answer |= transfer_params([request.request_id for request in job.requests], ctx.resolved.engine.speculative)
    metrics = response_metrics(candidates, job.level, max_nodes=ctx.max_nodes)
    return answer if metrics is None else answer | {"metrics": metrics}


async def stream(body: CompletionBody, job: Job, streams: Sequence[OutputStream], *, ctx: ServerContext) -> AsyncGenerator[bytes, None]:
    """Yield the answer's events, one per engine output that has something to show."""
    options = body.stream_options
    has_usage = options is not None and (options.include_usage or options.continuous_usage_stats)
    events = ChunkWriter(job, "text_completion", has_usage=has_usage)
    writer = _ChoiceWriter(body, job, ctx)
    choices = [Collected() for _ in streams]
    is_plain = body.logprobs is None and not body.return_token_ids and not has_usage and not wants_trace(body)
    num_tokens = 0
    outputs = merged(streams)
    try:
        async for index, output in outputs:
            choice = choices[index]
            choice.count(output)
            if is_plain and writer.has_begun(index) and output.finish_reason is None:  # the hot path
                if output.text:
                    yield events.chunk(index, '"text":' + encode(output.text))
                continue
            shown = writer.delta(index, output)
            num_tokens += 0 if body.max_tokens == 0 else len(output.token_ids)
            if shown.is_empty and output.finish_reason is None:
                continue
            more = ""
            if options is not None and options.continuous_usage_stats:
                more = ',"usage":' + encode(_usage(job, num_tokens, choices))
            logprobs = "null" if shown.logprobs is None else encode(shown.logprobs)
            yield events.chunk(index, '"text":' + encode(shown.text), logprobs=logprobs, ending=shown.ending, more=more)
    finally:
        await outputs.aclose()
    if options is not None and options.include_usage:
        metrics = response_metrics(choices, job.level, max_nodes=ctx.max_nodes)
        members: dict[str, object] = {"usage": _usage(job, num_tokens, choices)}
        yield events.closing(members if metrics is None else members | {"metrics": metrics})


def _usage(job: Job, num_tokens: int, choices: Sequence[Collected]) -> dict[str, Any]:
    cached = cached_tokens(choices, per_prompt=job.per_prompt)
    return usage(num_prompt_tokens=job.num_prompt_tokens, num_completion_tokens=num_tokens, num_cached_tokens=cached, choices=choices)


def _best(candidates: Sequence[Collected], n: int, *, per_prompt: int) -> list[int]:
    """Return the indices to show, prompt by prompt; with best_of the n of highest log-probability per token, best first."""
    shown: list[int] = []
    for begin in range(0, len(candidates), per_prompt):
        indices = list(range(begin, begin + per_prompt))
        if n < per_prompt:
            indices = sorted(indices, key=lambda index: -_score(candidates[index]))[:n]
        shown += indices
    return shown


def _score(choice: Collected) -> float:
    return sum(entry.logprob for entry in choice.logprobs) / max(len(choice.logprobs), 1)


@dataclass(frozen=True, slots=True)
class _Shown:
    """What one event shows of a choice."""

    text: str
    logprobs: dict[str, Any] | None
    ending: Ending
    is_empty: bool


@dataclass(slots=True)
class _ChoiceWriter:
    """Prints choices: the echoed prompt first, then tokens, with text offsets running on."""

    body: CompletionBody
    job: Job
    ctx: ServerContext
    offsets: dict[int, int] = field(default_factory=dict)  # choice -> characters shown so far; absent: not begun

    def has_begun(self, index: int) -> bool:
        """True once the first event of the choice is written."""
        return index in self.offsets

    def whole(self, index: int, choice: Collected) -> dict[str, Any]:
        """Return a finished choice without its index."""
        output = EngineOutput(
            request_id=self.job.requests[index].request_id,
            text=choice.text,
            token_ids=tuple(choice.token_ids),
            logprobs=tuple(choice.logprobs),
            prompt_logprobs=choice.prompt_logprobs,
        )
        text, logprobs = self._show(index, output)
        members: dict[str, Any] = {
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return members | self._extra(index, output, is_first=True)

    def delta(self, index: int, output: EngineOutput) -> _Shown:
        """Return what the newest output adds."""
        is_first = not self.has_begun(index)
        text, logprobs = self._show(index, output)
        extra = self._extra(index, output, is_first=is_first)
        ending = Ending(encode(output.finish_reason), encode(output.stop_reason), "," + encode(extra)[1:-1] if extra else "")
        is_empty = not (text or extra or (logprobs and logprobs["tokens"]))
        return _Shown(text, logprobs, ending, is_empty)

    def _show(self, index: int, output: EngineOutput) -> tuple[str, dict[str, Any] | None]:
        """Return text and log-probabilities, the prompt in front where echo asks for it and the choice begins."""
        text, token_ids, entries = output.text, list(output.token_ids), list[TokenLogprobs | None](output.logprobs or ())
        if self.body.max_tokens == 0:  # one token was drawn only because the engine draws at least one
            text, token_ids, entries = "", [], []
        if not self.has_begun(index):
            self.offsets[index] = 0
            if self.body.echo:
                prompt = self.job.prompt_of(index)
                text = self._prompt_text(index) + text
                token_ids = [*prompt.token_ids, *token_ids]
                entries = [*(output.prompt_logprobs or ()), *entries]
        if self.body.logprobs is None:
            return text, None
        shown, self.offsets[index] = completion_logprobs(token_ids, entries, tokens=self.ctx.token_texts, text_offset=self.offsets[index])
        return text, shown

    def _extra(self, index: int, output: EngineOutput, *, is_first: bool) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self.body.return_token_ids:
            extra["token_ids"] = [] if self.body.max_tokens == 0 else list(output.token_ids)
            if is_first:
                extra["prompt_token_ids"] = list(self.job.prompt_of(index).token_ids)
        if self.body.prompt_logprobs is not None and is_first:
            extra["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or (), tokens=self.ctx.token_texts)
        if wants_trace(self.body) and self.body.max_tokens != 0:
            extra["specdec"] = draft_trace(output, self.ctx.token_texts)
        return extra

    def _prompt_text(self, index: int) -> str:
        prompt = self.job.prompt_of(index)
        return self.ctx.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text
