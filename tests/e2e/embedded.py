"""The embedded model for acceptance tests: read once for each dtype, then driven by engines of any configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal
from unittest import mock

import pytest

from specdec.config.engine import CacheConfig, EngineConfig, ModelConfig, ResolvedConfig, SchedulerConfig
from specdec.config.resolve import resolve
from specdec.config.speculative import parse_speculative
from specdec.engine.core import EngineCore
from specdec.engine.tokenizer import Tokenizer
from specdec.errors import ConfigError
from specdec.models.registry import TargetModel
from specdec.models.source import embedded_gguf
from specdec.sampling_params import SamplingParams, SpeculationParams
from specdec.tools.arm import Answer, Arm, Question
from specdec.tools.prompts import prompts_for
from specdec.tools.scoring import Scorer
from specdec.worker import worker

MAX_MODEL_LEN = 640  # the longest prompt of the benchmark has about 400 tokens
BlockDtype = Literal["float32", "bfloat16"]


class Embedded:
    """SmolLM2-135M in one dtype. Engines over it share its weights, so run one at a time."""

    def __init__(self, dtype: BlockDtype) -> None:
        self.dtype = dtype
        self.model: TargetModel | None = None
        self.tokenizer: Tokenizer | None = None

    @property
    def is_fused(self) -> bool:
        """True when the compiled stack serves it, whose rows have the same bits in any batch."""
        return getattr(self.model, "fused", None) is not None

    def arm(
        self, speculation: dict[str, Any] | None = None, *, num_blocks: int = 400, prefix_caching: bool = False, **scheduler: Any
    ) -> Arm:
        """Build an engine; `scheduler` are fields of SchedulerConfig."""
        resolved = self._resolve(speculation, num_blocks=num_blocks, prefix_caching=prefix_caching, **scheduler)
        self.tokenizer = self.tokenizer or Tokenizer.from_resolved(resolved)
        with mock.patch.object(worker, "load_model", self._load_once(worker.load_model)):
            runner = worker.load_runner(resolved)
        return Arm(EngineCore(resolved, runner, tokenizer=self.tokenizer), runner)

    def scorer(self) -> Scorer:
        """The model's own logits of finished texts."""
        assert self.model is not None
        return Scorer(self.model, max_len=MAX_MODEL_LEN)

    def questions(self, texts: Sequence[str], sampling: SamplingParams) -> list[Question]:
        """Ask each text as a chat message, as the benchmark does."""
        return [Question(self.encode(text), sampling) for text in texts]

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of one chat message and the head of its answer."""
        if self.tokenizer is None:
            self.tokenizer = Tokenizer.from_resolved(self._resolve(None))
        chat = self.tokenizer.render_chat([{"role": "user", "content": text}])
        return self.tokenizer.encode(chat, add_special_tokens=False)

    def _load_once(self, load: Any) -> Any:
        def kept(*args: Any, **options: Any) -> TargetModel:
            if self.model is None:
                self.model = load(*args, **options)
            return self.model

        return kept

    def _resolve(
        self, speculation: dict[str, Any] | None, *, num_blocks: int = 400, prefix_caching: bool = False, **scheduler: Any
    ) -> ResolvedConfig:
        limits: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_waiting": 0} | scheduler
        return resolve(
            EngineConfig(
                model=ModelConfig(dtype=self.dtype, max_model_len=MAX_MODEL_LEN),
                cache=CacheConfig(num_blocks=num_blocks, enable_prefix_caching=prefix_caching),
                scheduler=SchedulerConfig(**limits),
                speculative=parse_speculative(speculation) if speculation else None,
                device="cpu",
            )
        )


@cache
def embedded(dtype: BlockDtype) -> Embedded:
    """The model in this dtype; skips the test where its package is not installed."""
    try:
        embedded_gguf()
    except ConfigError as error:
        pytest.skip(f"THE EMBEDDED MODEL IS NOT TESTED: {error.message}")
    return Embedded(dtype)


def lookup(num_drafts: int) -> dict[str, Any]:
    """Drafts by prompt lookup, eager enough that chat answers get some too."""
    return {"method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_min": 1, "prompt_lookup_max": 4}


def benchmark_prompts(*, chat: int, copy: int) -> list[str]:
    """The first prompts of both workloads of the benchmark."""
    return [*prompts_for("chat", chat), *prompts_for("copy", copy)]


def drafting(question: Question, num_drafts: int) -> Question:
    """The same question with its own limit of drafts."""
    wish = SpeculationParams(num_speculative_tokens=num_drafts)
    return replace(question, sampling=replace(question.sampling, speculation=wish))


def answers(arm: Arm, questions: Sequence[Question]) -> list[Answer]:
    """Answer all questions side by side."""
    return arm.answer(questions, advance=lambda _: None)
