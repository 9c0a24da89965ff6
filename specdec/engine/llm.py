"""LLM: offline generation with the engine, in the shape vLLM's users know.

Owns: fan-out of prompts and samples, order, the progress bar. Must not know: HTTP, threads. Read next: engine/core.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal
from uuid import uuid4

from specdec.config.engine import EMBEDDED_MODEL, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from specdec.engine.core import EngineCore
from specdec.engine.results import GenerationOutput, SampleCollector, collect
from specdec.engine.tokenizer import Messages, Tokenizer
from specdec.engine.types import EngineRequest
from specdec.errors import RequestRejected
from specdec.metrics.stats import EngineStats
from specdec.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}


class LLM:
    """A model, loaded and ready to generate. Close it, or use it as a context manager, to free its memory.

    Speculation: `speculative_config` as JSON text or mapping in vLLM's spelling, or the short forms `spec_method`,
    `spec_model`, `spec_tokens`. None of them: plain decoding.

    Raises:
        ConfigError: a value cannot be used; the text names it and the way out.
    """

    def __init__(
        self,
        model: str = EMBEDDED_MODEL,
        *,
        speculative_config: str | Mapping[str, Any] | None = None,
        spec_method: str | None = None,
        spec_model: str | None = None,
        spec_tokens: int | None = None,
        tokenizer: str | None = None,
        revision: str | None = None,
        dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
        device: Literal["auto", "cpu", "cuda"] = "auto",
        seed: int = 0,
        trust_remote_code: bool = False,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        num_blocks: int | None = None,
        memory_fraction: float | None = None,
        enable_prefix_caching: bool = True,
    ) -> None:
        from specdec.config.resolve import resolve
        from specdec.config.speculative import parse_speculative

        raw = dict(speculative_config) if isinstance(speculative_config, Mapping) else speculative_config
        speculative = parse_speculative(raw, spec_method=spec_method, spec_model=spec_model, spec_tokens=spec_tokens)
        config = EngineConfig(
            model=ModelConfig(
                model=model,
                tokenizer=tokenizer,
                revision=revision,
                dtype=dtype,
                max_model_len=max_model_len,
                seed=seed,
                trust_remote_code=trust_remote_code,
            ),
            cache=CacheConfig(
                block_size=block_size, num_blocks=num_blocks, memory_fraction=memory_fraction, enable_prefix_caching=enable_prefix_caching
            ),
            # an offline call hands in all its prompts at once: no limit on waiting ones
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_waiting=0),
            speculative=speculative,
            device=device,
        )
        self._core = EngineCore.from_config(resolve(config))

    @classmethod
    def from_core(cls, core: EngineCore) -> LLM:
        """Wrap an engine core that was built elsewhere; it is closed with this object."""
        llm = cls.__new__(cls)
        llm._core = core
        return llm

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._core.tokenizer

    @property
    def stats(self) -> EngineStats:
        """A copy of all counters since the model was loaded."""
        return self._core.stats.snapshot()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[GenerationOutput]:
        """Complete every prompt and return the results in the order of the prompts.

        sampling_params: one for all, or one for each prompt; None takes the defaults. use_tqdm: show a progress bar.

        Raises:
            RequestRejected: a prompt or its parameters cannot be served; nothing is generated then.
        """
        batch = _as_batch(prompts)
        sampling = _as_sampling(sampling_params, len(batch))
        encoded = [self._encode(prompt) for prompt in batch]
        return self._run(encoded, sampling, show_progress=use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[GenerationOutput]:
        """Answer one conversation, or each of several, through the model's chat template. Otherwise as `generate`."""
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        encoded: list[tuple[str | None, tuple[int, ...]]] = []
        for conversation in conversations:
            text = self.tokenizer.render_chat(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
                template_kwargs=chat_template_kwargs,
            )
            encoded.append((text, self.tokenizer.encode(text, add_special_tokens=False)))
        return self._run(encoded, _as_sampling(sampling_params, len(encoded)), show_progress=use_tqdm)

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the KV caches back (level 1), and that of all weights too (level 2), until `wake_up`."""
        self._core.sleep(level)

    def wake_up(self) -> None:
        """Be ready to generate again; after level 2 the weights are read again."""
        self._core.wake_up()

    def reload_weights(self, weights_path: str | None = None, draft_weights_path: str | None = None) -> None:
        """Read the weights of target and drafter again, from other checkpoints of the same models where paths are given; wakes up.

        Raises:
            ConfigError: a checkpoint cannot be read or is of another model; nothing has changed then.
        """
        self._core.reload_weights(weights_path, draft_weights_path)

    def close(self) -> None:
        """Free the model. The object cannot generate afterwards."""
        self._core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if not isinstance(prompt, Mapping):
            return None, tuple(prompt)
        if not prompt or prompt.keys() - {"prompt", "prompt_token_ids"}:
            raise RequestRejected(f"prompt has the keys {sorted(prompt)}, but takes prompt or prompt_token_ids", param="prompt")
        text: str | None = prompt.get("prompt")
        token_ids = prompt.get("prompt_token_ids")
        return text, self.tokenizer.encode(text or "") if token_ids is None else tuple(token_ids)

    def _run(
        self, prompts: Sequence[tuple[str | None, tuple[int, ...]]], sampling: Sequence[SamplingParams], *, show_progress: bool
    ) -> list[GenerationOutput]:
        arrival_s = time.monotonic()
        samples: list[list[SampleCollector]] = []
        for (_, token_ids), params in zip(prompts, sampling, strict=True):
            base = EngineRequest(request_id=uuid4().hex, prompt_token_ids=token_ids, sampling=params, arrival_s=arrival_s)
            samples.append([SampleCollector(_sample_of(base, index)) for index in range(params.n)])
        live = {sample.request.request_id: sample for group in samples for sample in group}
        for sample in live.values():
            self._core.check(sample.request)
        try:
            for sample in live.values():
                self._core.add_request(sample.request)
            with _progress(len(live), show=show_progress) as advance:
                self._drain(live, advance)
        finally:
            for request_id in live:  # after an error or Ctrl-C nothing of this call may stay behind
                self._core.abort(request_id)
        return [collect(text, token_ids, group) for (text, token_ids), group in zip(prompts, samples, strict=True)]

    def _drain(self, live: Mapping[str, SampleCollector], advance: Callable[[int, int], None]) -> None:
        while self._core.has_work:
            num_tokens = num_finished = 0
            for output in self._core.step():
                sample = live.get(output.request_id)
                if sample is None:
                    continue
                sample.add(output)
                num_tokens += len(output.token_ids)
                num_finished += output.finish_reason is not None
            advance(num_finished, num_tokens)


def _sample_of(base: EngineRequest, index: int) -> EngineRequest:
    """Return sample `index` of a request: a given seed moves on by the index, so that samples differ and repeat."""
    seed = None if base.sampling.seed is None else base.sampling.seed + index
    return replace(base, request_id=f"{base.request_id}-{index}", sampling=replace(base.sampling, n=1, seed=seed))


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    batch: list[Any] = list(prompts)
    return [batch] if batch and all(isinstance(item, int) for item in batch) else batch


def _as_sampling(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise RequestRejected(f"sampling_params has {len(params)} entries, but there are {num_prompts} prompts", param="sampling_params")
    return list(params)


def _silent(num_finished: int, num_tokens: int) -> None:
    """Show nothing."""


@contextmanager
def _progress(num_requests: int, *, show: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield advance(num_finished, num_tokens), which draws the bar on stderr, or does nothing."""
    if not show:
        yield _silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[rate]}"))
    started_s = time.monotonic()
    total_tokens = 0
    with Progress(*columns, console=Console(stderr=True), transient=False) as progress:
        task = progress.add_task("generating", total=num_requests, rate="")

        def advance(num_finished: int, num_tokens: int) -> None:
            nonlocal total_tokens
            total_tokens += num_tokens
            rate = total_tokens / max(time.monotonic() - started_s, 1e-9)
            progress.update(task, advance=num_finished, rate=f"{rate:.1f} tok/s")

        yield advance
