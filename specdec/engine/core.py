"""EngineCore: one decode step from plan to text.

Owns: the order of a step and its failure rules. Must not know: HTTP, threads, how drafts are made.
Read next: scheduler/scheduler.py, then worker/model_runner.py.

One step of one request, with K = 3 drafts waiting of which the target keeps one (counts in tokens):

    moment      num_tokens  num_computed  drafts  what happened
    before          10            9          3    a decoding request has exactly one uncomputed token
    schedule        10           13          3    plan 13 - 9 = 4 rows, positions 9 to 12; computed counts run ahead
    execute         10           13          -    target keeps d1, refuses d2, draws r: token_ids = (d1, r), 2 rejected
    update          12           11          n    commit appends d1 r, takes the 2 rejected rows back: 13 - 2 = 11 = 12 - 1
    emit            12           11          n    d1 and r become text; n drafts of the proposer wait for the next step

If d1 were an end-of-sequence token, update would keep (d1,) alone; if d1 completed a stop string, emit would, and tell the
scheduler. Either way ids, log-probabilities, text, counts and usage end with d1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

from specdec.config.engine import ResolvedConfig
from specdec.engine.admission import check_request, with_grammar, with_token_ids
from specdec.engine.output_processor import OutputProcessor, Tracer
from specdec.engine.token_table import vocabulary_of
from specdec.engine.tokenizer import Tokenizer
from specdec.engine.types import EngineOutput, EngineRequest
from specdec.engine.worker_thread import Lane, OwnThread, WorkerThread
from specdec.errors import EngineAsleep, EngineDeadError, RequestRejected
from specdec.metrics.stats import EngineStats, IntervalLog, StepGauges
from specdec.scheduler.output import ModelRunnerOutput, RequestOutput, SchedulerOutput, StepResult
from specdec.scheduler.policy import build_policy
from specdec.scheduler.request import CommitResult, Request
from specdec.scheduler.scheduler import Scheduler
from specdec.structured.compiler import GrammarCompiler

_NOTHING = RequestOutput()
SLEEP_LEVELS = (1, 2)


class Runner(Protocol):
    """What the engine needs of a worker."""

    num_blocks: int

    def execute(self, plan: SchedulerOutput, /) -> StepResult:
        """Run one step, or hand it to a device that will."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class SleepingWeights(Protocol):
    """Weights and caches that a worker can give back and read again; see worker/weights.py."""

    def sleep(self, level: int, /) -> None:
        """Give back caches (1), and weights too (2)."""
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...

    def reload(self, path: str | None, draft_path: str | None, /) -> None:
        """Read weights again, and wake."""
        ...


class EngineCore:
    """One scheduler, one worker, one tokenizer. Single-threaded, but for `check`, `describe_requests` and `grammars`.

    A request that fails alone (RequestOutput.error) ends as "error" and the others go on. An exception out of `step` means
    that worker and scheduler may disagree, so the core refuses to be stepped again.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        runner: Runner,
        *,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
        lane: Lane | None = None,
    ) -> None:
        self.resolved = resolved
        self.tokenizer = tokenizer
        self.stats = EngineStats()
        self.grammars = GrammarCompiler(  # the vocabulary is read when the first constraint comes
            lambda: vocabulary_of(tokenizer, vocab_size=resolved.vocab_size, eos_token_ids=resolved.eos_token_ids)
        )
        self._runner = runner
        self._clock = clock  # seconds, on the same scale as EngineRequest.arrival_s
        self._scheduler = Scheduler(resolved, runner.num_blocks, build_policy(resolved))
        self._processor = OutputProcessor(tokenizer, self.stats)
        self._log = IntervalLog(self.stats, now_s=self._clock())
        self._lane = lane or lane_for(resolved)
        self._in_flight: _InFlight | None = None
        self._failure: BaseException | None = None
        self._sleep_level = 0  # 0: awake

    @classmethod
    def from_config(cls, resolved: ResolvedConfig) -> EngineCore:
        """Load tokenizer and worker. Slow: reads the weights.

        Raises:
            ConfigError: the model or the tokenizer cannot be read, or does not fit into memory.
        """
        from specdec.worker.worker import load_runner

        tokenizer = Tokenizer.from_resolved(resolved)  # first: it fails fast
        lane = lane_for(resolved)
        return cls(resolved, lane.submit(load_runner, resolved).result(), tokenizer=tokenizer, lane=lane)

    def trace_with(self, tracer: Tracer) -> None:
        """Tell `tracer` of every request that ends from now on."""
        self._processor.tracer = tracer

    def check(self, request: EngineRequest) -> None:
        """Refuse what this model cannot serve; any thread may call it before `add_request`.

        Raises:
            RequestRejected: `param` names the field.
        """
        check_request(request, self.resolved)

    def add_request(self, request: EngineRequest) -> None:
        """Put a request into the waiting queue.

        Raises:
            RequestRejected: it cannot be served as asked, or its id is in use.
            QueueFull: the waiting queue is at its limit.
            EngineAsleep: weights or caches are given back.
            EngineDeadError: a step failed.
        """
        self._require_alive()
        if self._sleep_level:
            raise EngineAsleep("the engine sleeps", hint="wake it first")
        self.check(request)
        if request.request_id in self._processor:
            raise RequestRejected(f"request_id {request.request_id!r} is in use", param="request_id", hint="send another id, or none")
        request = with_grammar(with_token_ids(request, self.tokenizer), self.grammars)
        if not request.arrival_s:
            request = replace(request, arrival_s=self._clock())
        self._scheduler.add(
            Request(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling=request.sampling,
                arrival_s=request.arrival_s,
                priority=request.priority,
                tenant=request.tenant,
                track_drafts=request.track_drafts,
            )
        )
        self._processor.add(request)

    def abort(self, request_id: str) -> EngineOutput | None:
        """End a request now and return its last output; None when it has ended already."""
        if request_id not in self._processor:
            return None
        self._scheduler.abort(request_id)
        with self.stats.lock:
            self.stats.gauges = self._gauges()
            return self._processor.end(request_id, "abort", now_s=self._clock())

    def step(self) -> list[EngineOutput]:
        """Run one step: schedule, execute, commit, turn tokens into text, count. Returns what clients get, in batch order.

        Raises:
            EngineDeadError: an earlier step failed. Whatever a step itself raises is the engine's end.
        """
        self._require_alive()
        try:
            return self._step_overlapped() if self.resolved.engine.scheduler.async_scheduling else self._step()
        except BaseException as error:  # Ctrl-C too: the worker may have run half a step
            self._failure = error
            raise

    @property
    def is_sleeping(self) -> bool:
        """True between `sleep` and `wake_up`."""
        return self._sleep_level > 0

    def sleep(self, level: int = 1) -> None:
        """Give memory back: level 1 the KV caches, level 2 the weights of target and drafter too. Cached prefixes are forgotten.

        Raises:
            RequestRejected: there is no such level, requests have not ended, or the worker has nothing to give back.
        """
        if level not in SLEEP_LEVELS:
            raise RequestRejected(f"level is {level}, but it must be 1 (give KV caches back) or 2 (weights too)", param="level")
        self._lane.submit(self._idle_weights().sleep, level).result()
        self._scheduler.kv.reset_prefix_cache()
        self._note_sleep(max(self._sleep_level, level))

    def wake_up(self) -> None:
        """Undo `sleep`; after level 2 the weights are read from where they came from last. Awake already: nothing happens.

        Raises:
            ConfigError: they cannot be read; the engine sleeps on.
        """
        if self._sleep_level:
            self._lane.submit(self._idle_weights().wake).result()
            self._note_sleep(0)

    def reload_weights(self, weights_path: str | None = None, draft_weights_path: str | None = None) -> None:
        """Read the weights of target and drafter again, from other checkpoints of the same models where paths are given, and wake up.

        Texts that suffix drafting has learnt are kept: they are guesses, which the new weights verify.

        Raises:
            ConfigError: a checkpoint cannot be read or is of another model; nothing has changed then.
            RequestRejected: as for `sleep`.
        """
        self._lane.submit(self._idle_weights().reload, weights_path, draft_weights_path).result()
        self._scheduler.kv.reset_prefix_cache()
        self._note_sleep(0)

    def _note_sleep(self, level: int) -> None:
        """Gauges are those of the newest step, and a sleeping engine makes none."""
        self._sleep_level = level
        with self.stats.lock:
            self.stats.gauges = self._gauges()

    @property
    def has_work(self) -> bool:
        """True while `step` has something to do, telling the worker of ended requests included."""
        return self._scheduler.has_work or self._scheduler.has_unsent_finishes or self._in_flight is not None

    @property
    def num_waiting(self) -> int:
        """Requests in the waiting queue."""
        return self._scheduler.num_waiting

    @property
    def corpora(self) -> Any:
        """Texts to draft from that clients may add and remove, from any thread; None where no source reads such texts."""
        return getattr(self._runner, "corpora", None)

    def describe_requests(self) -> dict[str, dict[str, Any]]:
        """State of every live request, for a watchdog: it may be read while a step hangs."""
        now_s = self._clock()
        report: dict[str, dict[str, Any]] = {}
        for request in list(self._scheduler.requests.values()):
            report[request.request_id] = {
                "status": request.status.value,
                "num_computed_tokens": request.num_computed_tokens,
                "num_draft_nodes": request.num_draft_nodes,
                "num_in_flight_tokens": request.num_in_flight_tokens,
                "num_blocks": len(request.block_ids),
                **self._processor.describe(request.request_id, now_s),
            }
        return report

    def close(self) -> None:
        """Free the worker. The core cannot step afterwards."""
        self._lane.close()
        self.grammars.close()
        if self._failure is None:
            self._failure = EngineDeadError("the engine was closed")
            self._runner.close()

    def _idle_weights(self) -> SleepingWeights:
        """The worker's weights, once it has heard of everything and runs nothing."""
        self._require_alive()
        count = len(self._scheduler.requests)
        if count:
            raise RequestRejected(f"{count} requests have not ended", hint="let them end, or abort them")
        while self.has_work:
            self.step()
        weights: SleepingWeights | None = getattr(self._runner, "weights", None)
        if weights is None:
            raise RequestRejected("this worker cannot give its weights back", hint="use the engine's own worker")
        return weights

    def _require_alive(self) -> None:
        if isinstance(self._failure, EngineDeadError):
            raise EngineDeadError(self._failure.message)
        if self._failure is not None:
            cause = f"{type(self._failure).__name__}: {self._failure}".rstrip(": ")
            raise EngineDeadError(f"an earlier step failed ({cause})", hint="load the model again") from self._failure

    def _step(self) -> list[EngineOutput]:
        plan, schedule_s = self._schedule()
        return self._complete(plan, self._lane.submit(self._runner.execute, plan).result().result(), schedule_s=schedule_s)

    def _step_overlapped(self) -> list[EngineOutput]:
        """Plan and hand over the next step, then finish the one before it while the next already runs."""
        previous, self._in_flight = self._in_flight, None
        plan, schedule_s = self._schedule()
        if plan.num_scheduled_tokens or plan.finished or plan.preempted_ids:
            self._in_flight = _InFlight(plan, self._lane.submit(self._runner.execute, plan), schedule_s)
        if previous is None:
            return []
        return self._complete(previous.plan, previous.step.result().result(), schedule_s=previous.schedule_s)

    def _schedule(self) -> tuple[SchedulerOutput, float]:
        """Plan a step; return it and the seconds that took."""
        start_s = self._clock()
        plan = self._scheduler.schedule()
        for new in plan.new:
            self._processor.mark_scheduled(new.request_id, start_s)
        return plan, self._clock() - start_s

    def _complete(self, plan: SchedulerOutput, result: ModelRunnerOutput, *, schedule_s: float) -> list[EngineOutput]:
        now_s = self._clock()
        commits = self._scheduler.update(plan, result)
        with self.stats.lock:
            outputs = self._emit(commits, result.results, now_s=now_s)
            self._observe(plan, result, schedule_s=schedule_s, output_s=self._clock() - now_s)
        self._log.tick(now_s)
        return outputs

    def _emit(self, commits: Mapping[str, CommitResult], results: Mapping[str, RequestOutput], *, now_s: float) -> list[EngineOutput]:
        """Turn commits into outputs; a stop string ends its request in the scheduler too."""
        outputs: list[EngineOutput] = []
        for request_id, commit in commits.items():
            emitted = self._processor.process(request_id, commit, result=results.get(request_id, _NOTHING), now_s=now_s)
            if emitted.cut_at is not None:
                self._scheduler.finish(request_id, "stop", num_tokens=emitted.cut_at)
            if emitted.output is not None:
                outputs.append(emitted.output)
        return outputs

    def _observe(self, plan: SchedulerOutput, result: ModelRunnerOutput, *, schedule_s: float, output_s: float) -> None:
        if not plan.num_scheduled_tokens:
            self.stats.gauges = self._gauges()
            return
        timings = result.timings
        durations_s = (
            ("schedule", schedule_s),
            ("prepare", timings.prepare_s),
            ("forward", timings.forward_s),
            ("verify", timings.verify_s),
            ("propose", timings.propose_s),
            ("output", output_s),
        )
        self.stats.observe_step(result.num_rows, durations_s=durations_s, gauges=self._gauges())

    def _gauges(self) -> StepGauges:
        scheduler, policy = self._scheduler, self._scheduler.policy.state()
        return StepGauges(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.kv_usage,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.kv.num_queried_tokens,
            prefix_cache_hits=scheduler.kv.num_hit_tokens,
            draft_length=policy.draft_length,
            num_draft_length_changes=policy.num_switches,
            draft_bank_s=policy.bank_s,
            drafter_bytes=getattr(self._runner, "drafter_bytes", 0),
            drafter_faults=getattr(self._runner, "drafter_faults", {}),
            sleep_level=self._sleep_level,
        )


def lane_for(resolved: ResolvedConfig) -> Lane:
    """Return where the worker runs: beside the engine when steps overlap, else on the engine's thread."""
    return WorkerThread() if resolved.engine.scheduler.async_scheduling else OwnThread()


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step the worker has and the scheduler has not committed."""

    plan: SchedulerOutput
    step: Future[StepResult]
    schedule_s: float
