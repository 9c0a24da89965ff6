"""StepRecord: a step that was handed to the device, what is known of it already, and what its results become on the host.

Owns: the way from device tensors to RequestOutput, and setting the host's counts right. Must not know: models, proposers.
Read next: model_runner.py.

The counts of a RowInfo run ahead while a step is on its way, as if all its drafts were kept, like those of the scheduler's Request.
`settle_*` takes back what was not; only the worker's thread does that. `result` changes nothing, so any thread may wait there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdec.kernels.transfers import Download
from specdec.scheduler.output import ModelRunnerOutput, RequestOutput, TokenLogprobs
from specdec.worker.input_batch import InputBatch
from specdec.worker.request_state import RowInfo
from specdec.worker.step_clock import StepClock

_NO_FINITE_LOGIT = "no token has a finite logit (numerical failure, or every token is forbidden)"


@dataclass(frozen=True, slots=True)
class Emitted:
    """One request's share of a verified step, on the host. tested and invalid count drafts, rejected their rows."""

    tokens: list[int]
    rejected: int
    tested: int
    invalid: int


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One step's requests in batch order, and the copies that bring its results.

    emitted: token_ids [R, D+1], then num_sampled, num_rejected, num_drafts, num_invalid [R]. drafted: num_nodes [R] and the
    tokens drawn from the target's law [R] (-1: none); None without a proposer. sources: who drafted what this step tested.
    The rest is known only of steps that waited for their results, by batch index.
    """

    serial: int
    epoch: Mapping[str, int]
    infos: Sequence[RowInfo]
    batch: InputBatch
    clock: StepClock
    is_lossy: bool
    sources: Sequence[str]
    emitted: Download
    drafted: Download | None = None
    draft_token_ids: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs | None, ...]] = field(default_factory=dict)
    faults: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_here(self) -> bool:
        """True when nothing of the step is on its way any more."""
        return self.emitted.is_here and (self.drafted is None or self.drafted.is_here)

    def run_ahead(self) -> None:
        """Count the step's rows and the most tokens it can emit."""
        for info, num_rows, num_logits in zip(self.infos, self.batch.query_lens_cpu, self.batch.num_logits_cpu, strict=True):
            info.num_computed += num_rows
            info.num_tokens += num_logits
            info.num_drafts = 0
            info.newest_step = self.serial

    def settle_emitted(self) -> list[Emitted]:
        """Set the counts right by what was emitted, and append it to the histories."""
        emitted = self._emitted()
        for info, one, num_logits in zip(self.infos, emitted, self.batch.num_logits_cpu, strict=True):
            info.num_computed -= one.rejected
            info.num_tokens -= num_logits - len(one.tokens)
            info.token_ids += one.tokens
        return emitted

    def expect(self, max_nodes: Sequence[int], *, may_draw: bool) -> None:
        """Count the most drafts that may come, and a token that may be drawn beside them."""
        for info, count in zip(self.infos, max_nodes, strict=True):
            info.num_drafts = count
            info.num_tokens += may_draw
            info.num_computed += may_draw

    def settle_drafted(self) -> None:
        """Set the counts right by what was drafted; of a request that went on meanwhile, only its tokens."""
        num_nodes, drawn = self._drafted()
        may_draw = bool(drawn)
        for index, (info, count) in enumerate(zip(self.infos, num_nodes, strict=True)):
            if info.newest_step == self.serial:
                assert 0 <= count <= info.num_drafts, f"{info.request_id}: {count} drafts, but at most {info.num_drafts} were ordered"
                info.num_drafts = count
            if may_draw and drawn[index] >= 0:
                info.token_ids.append(drawn[index])
            elif may_draw:
                info.num_tokens -= 1
                info.num_computed -= 1

    def result(self) -> ModelRunnerOutput:
        """Wait for the step, and return what it emitted."""
        emitted = self._emitted()
        num_nodes, drawn = self._drafted()
        outputs = {
            info.request_id: self._output(index, info, one, num_next=num_nodes[index], drawn=drawn[index] if drawn else -1)
            for index, (info, one) in enumerate(zip(self.infos, emitted, strict=True))
        }
        return ModelRunnerOutput(results=outputs, epoch=self.epoch, num_rows=sum(self.batch.query_lens_cpu), timings=self.clock.timings())

    def _drafted(self) -> tuple[list[int], list[int]]:
        """(nodes of each request, the tokens drawn beside them, or nothing where no pass draws any)."""
        if self.drafted is None:
            return [0] * len(self.infos), []
        num_nodes, *drawn = self.drafted.lists()
        return num_nodes, drawn[0] if drawn else []

    def _emitted(self) -> list[Emitted]:
        tokens, *counts = self.emitted.lists()
        return [
            Emitted(row[:sampled], rejected, tested, invalid)
            for row, sampled, rejected, tested, invalid in zip(tokens, *counts, strict=True)
        ]

    def _output(self, index: int, info: RowInfo, one: Emitted, *, num_next: int, drawn: int) -> RequestOutput:
        """A draft is invalid because a grammar refuses it; other rows without one were planned for drafts that nobody made."""
        failed = not one.tokens and self.batch.num_logits_cpu[index] > 0
        invalid = one.invalid if info.matcher is not None else 0
        return RequestOutput(
            token_ids=(*one.tokens, drawn) if drawn >= 0 else tuple(one.tokens),
            num_target_tokens=int(drawn >= 0),
            num_drafts=one.tested,
            num_invalid=invalid,
            num_next=num_next,
            is_lossy=self.is_lossy and one.tested > 0,
            source=self.sources[index] if one.tested or invalid else "",
            draft_token_ids=self.draft_token_ids.get(index, ()),
            logprobs=self.logprobs.get(index),
            prompt_logprobs=self.prompt_logprobs.get(index),
            error=_NO_FINITE_LOGIT if failed else self.faults.get(index),
        )
