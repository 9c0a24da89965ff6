"""Arm: one engine under test, with or without speculation, that answers lists of requests.

Owns: driving an engine core and noting which step emitted what. Must not know: statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.config.engine import ResolvedConfig
from specdec.engine.core import EngineCore, lane_for
from specdec.engine.tokenizer import Tokenizer
from specdec.engine.types import EngineRequest
from specdec.errors import SpecdecError
from specdec.models.registry import TargetModel
from specdec.sampling_params import SamplingParams
from specdec.worker.model_runner import ModelRunner
from specdec.worker.worker import load_runner

Advance = Callable[[int], None]  # tokens done since the last call


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and how its answer is drawn; the seed is always given."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


@dataclass(slots=True)
class Answer:
    """What came back. slots: for each token, its place in the step that emitted it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    finish_reason: str = ""


class Arm:
    """An engine core and the model inside it. The model outlives `close`, so that texts can be scored with the same weights."""

    def __init__(self, core: EngineCore, runner: ModelRunner) -> None:
        self._core = core
        self.model: TargetModel = runner.model
        self.tokenizer: Tokenizer = core.tokenizer
        self.resolved: ResolvedConfig = core.resolved

    @classmethod
    def load(cls, resolved: ResolvedConfig) -> Arm:
        """Load tokenizer and weights.

        Raises:
            ConfigError: a file cannot be read, or memory does not suffice.
        """
        tokenizer = Tokenizer.from_resolved(resolved)
        lane = lane_for(resolved)
        runner = lane.submit(load_runner, resolved).result()
        return cls(EngineCore(resolved, runner, tokenizer=tokenizer, lane=lane), runner)

    @property
    def acceptance(self) -> tuple[int, int]:
        """(accepted, drafted) tokens so far."""
        total = self._core.stats.snapshot().spec.total
        return total.num_accepted_tokens, total.num_draft_tokens

    def answer(self, questions: Sequence[Question], *, advance: Advance) -> list[Answer]:
        """Answer all questions, in their order.

        Raises:
            RequestRejected: a prompt does not fit.
            SpecdecError: the engine failed a request.
        """
        answers: dict[str, Answer] = {}
        for index, question in enumerate(questions):
            answers[f"q{index}"] = Answer(question.prompt, question.sampling)
            self._core.add_request(EngineRequest(request_id=f"q{index}", prompt_token_ids=question.prompt, sampling=question.sampling))
        while self._core.has_work:
            emitted = 0
            for output in self._core.step():
                if output.error is not None:
                    raise SpecdecError(f"the engine failed a request: {output.error}", hint="verify needs a model that answers")
                answer = answers[output.request_id]
                answer.token_ids.extend(output.token_ids)
                answer.slots.extend(range(len(output.token_ids)))
                answer.finish_reason = output.finish_reason or ""
                emitted += len(output.token_ids)
            advance(emitted)
        return list(answers.values())

    def close(self) -> None:
        """Free caches and drafter."""
        self._core.close()
