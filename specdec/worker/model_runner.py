"""ModelRunner: executes one step. Gather, forward, verify, commit rows, propose, in that order and in one place.

Owns: the step on the device. Must not know: queues, text, or which draft method it holds.
Read next: batch_builder.py, sampler.py, proposers/base.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specdec.config.methods import Tap
from specdec.kernels.transfers import Downloads, downloads_for
from specdec.models.attention import Attend, AttentionMetadata, KVPair
from specdec.models.registry import TargetModel
from specdec.proposers.base import AdmitInfo, DraftBatch, DraftSampling, Proposer, StepView
from specdec.sampling_params import SamplingParams
from specdec.scheduler.output import ModelRunnerOutput, SchedulerOutput, StepResult
from specdec.structured.mask import DraftMasks
from specdec.worker.batch_builder import attention_metadata, build_batch
from specdec.worker.grammar_step import advance_matchers, keep_valid
from specdec.worker.input_batch import InputBatch, VerifyResult
from specdec.worker.logits import needs_processing
from specdec.worker.post_update import commit_rows, commit_target_tokens, compact_kv
from specdec.worker.prompt_logprobs import prompt_logprobs
from specdec.worker.request_state import RequestState, RowInfo
from specdec.worker.sampler import RawRows, Sampler
from specdec.worker.step_clock import StepClock
from specdec.worker.step_record import StepRecord
from specdec.worker.target_pass import Execution, TargetPass
from specdec.worker.weights import Weights


class ModelRunner:
    """Runs steps against one target, one paged cache and at most one proposer."""

    def __init__(
        self,
        model: TargetModel,
        kv: Sequence[KVPair],
        *,
        state: RequestState,
        sampler: Sampler,
        proposer: Proposer | None,
        block_size: int,
        weights: Weights | None = None,
        execution: Execution | None = None,
    ) -> None:
        self.model, self.kv, self.state, self.sampler, self.proposer = model, kv, state, sampler, proposer
        self.block_size, self.weights = block_size, weights
        self.num_blocks = kv[0][0].shape[0]
        self.downloads: Downloads = downloads_for(state.device)
        self._on_their_way: deque[StepRecord] = deque()  # handed to the device and not settled, oldest first
        self._num_steps = 0
        self._execution = execution or Execution()
        self._target = TargetPass(model, kv, taps=proposer.traits.taps if proposer else (), plan=self._execution.plan)
        # Of the newest step. The engine's thread reads them while the next step changes what they are counted from.
        self.drafter_bytes = 0  # host memory of a proposer that grows with what it reads
        self.drafter_faults: Mapping[str, int] = {}  # faults of the user's own code by kind

    @property
    def corpora(self) -> Any:
        """The proposer's shelf of texts to draft from, where it has one."""
        return getattr(self.proposer, "corpora", None)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> StepResult:
        """Run one step; the result tells what every scheduled request emitted. A device may still be at it when this returns."""
        clock = StepClock(self.state.device)
        self._settle_arrived()
        self._apply(plan)
        if not plan.num_scheduled_tokens:
            self._count_drafter()
            return ModelRunnerOutput(results={}, epoch=plan.epoch, num_rows=0)
        waits = self._waits([self.state.infos[request_id] for request_id in plan.num_scheduled_tokens])
        if waits:
            self._settle_all()
        infos, batch = build_batch(plan, self.state, block_size=self.block_size)
        meta = attention_metadata(batch, infos, self._execution.paged_attention)
        clock.mark()
        hidden, taps = self._target.run(batch, meta)  # [N, H]
        logits = self.model.compute_logits(hidden[batch.logits_indices])  # [L, V] f32
        clock.mark()
        verified, raw = self.sampler.verify(logits, batch, infos)
        if batch.parents is not None:
            compact_kv(self.kv, batch, verified)
        commit_rows(self.state, batch, verified)
        record = self._record(plan, infos, batch, verified, clock)
        if waits:
            self._wait(record, infos, verified, raw=raw, hidden=hidden)
        clock.mark()
        if self.proposer is not None:
            drafts = self._draft(self.proposer, plan, record, verified=verified, taps=taps)
            self._keep(drafts, record, waits=waits)
        clock.mark()
        self._count_drafter()
        if waits:
            return record.result()
        self._on_their_way.append(record)
        return record

    def close(self) -> None:
        """Drop caches and weights' last references."""
        self.kv, self.weights = (), None

    def _apply(self, plan: SchedulerOutput) -> None:
        """Bring the persistent rows up to the plan: free, admit, append blocks."""
        rows, outcomes = self.state.release(dict(plan.finished), plan.preempted_ids)
        if rows and self.proposer is not None:
            self.proposer.release(rows, outcomes)
        for cached in plan.cached:
            self.state.append_blocks(cached.request_id, cached.new_block_ids)
        admitted = [self.state.add(new) for new in plan.new]
        if admitted and self.proposer is not None:
            infos = [AdmitInfo(new.request_id, new.token_ids, new.tenant, new.sampling) for new in plan.new]
            self.proposer.admit([info.row for info in admitted], infos)

    def _count_drafter(self) -> None:
        self.drafter_bytes = int(getattr(self.proposer, "num_bytes", 0))
        self.drafter_faults = dict(getattr(self.proposer, "faults", {}))

    def _waits(self, infos: Sequence[RowInfo]) -> bool:
        """Whether this step's own results are needed before it can end. On a CPU they are there anyway."""
        if not self.downloads.is_late or (self.proposer is not None and self.proposer.traits.reads_host):
            return True
        return any(_reads_host(info) for info in infos)

    def _wait(self, record: StepRecord, infos: list[RowInfo], verified: VerifyResult, *, raw: RawRows, hidden: torch.Tensor) -> None:
        """Wait for what was emitted, and do what needs it before anybody drafts."""
        record.draft_token_ids = self._tracked_drafts(infos, record.batch)
        record.logprobs = self.sampler.logprobs(raw, verified, infos)
        record.prompt_logprobs = prompt_logprobs(self.model, self.state, infos, record.batch, hidden=hidden)
        record.faults = advance_matchers(infos, [one.tokens for one in record.settle_emitted()])

    def _settle_arrived(self) -> None:
        """Take in what has come from the device, without waiting."""
        while self._on_their_way and self._on_their_way[0].is_here:
            self._settle_oldest()

    def _settle_all(self) -> None:
        while self._on_their_way:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        record = self._on_their_way.popleft()
        record.settle_emitted()
        record.settle_drafted()

    def _record(
        self, plan: SchedulerOutput, infos: list[RowInfo], batch: InputBatch, verified: VerifyResult, clock: StepClock
    ) -> StepRecord:
        """Start the copy of what was emitted, which runs beside drafting, and count the step."""
        counts = (verified.num_sampled, verified.num_rejected, verified.num_drafts, verified.num_invalid)
        self._num_steps += 1
        record = StepRecord(
            serial=self._num_steps,
            epoch=plan.epoch,
            infos=infos,
            batch=batch,
            clock=clock,
            is_lossy=self.sampler.rule.is_lossy,
            sources=[info.source for info in infos],
            emitted=self.downloads.start(verified.token_ids, *counts),
        )
        record.run_ahead()
        return record

    def _tracked_drafts(self, infos: list[RowInfo], batch: InputBatch) -> dict[int, tuple[int, ...]]:
        """Tested drafts, by batch index, of the requests that ask to see them."""
        drafts = self.state.draft_token_ids
        tracked = [(index, info, count) for index, (info, count) in enumerate(zip(infos, batch.num_drafts_cpu, strict=True))]
        return {index: tuple(drafts[info.row, :count].tolist()) for index, info, count in tracked if count and info.track_drafts}

    def _draft(
        self,
        proposer: Proposer,
        plan: SchedulerOutput,
        record: StepRecord,
        *,
        verified: VerifyResult,
        taps: Mapping[Tap, torch.Tensor],
    ) -> DraftBatch:
        """Let the proposer extend its state and draft for the next step, within what was ordered."""
        infos = list(record.infos)
        orders = [plan.drafts_next.get(info.request_id) for info in infos]
        max_nodes = [min(order.max_nodes, self._room(info)) if order else 0 for order, info in zip(orders, infos, strict=True)]
        sources = [order.source if order else None for order in orders]
        drafts = proposer.propose(self._view(infos, record.batch, verified, taps=taps, max_nodes=max_nodes, sources=sources))
        assert len(drafts.num_nodes) == len(infos), f"the proposer answered for {len(drafts.num_nodes)} of {len(infos)} requests"
        record.expect(max_nodes, may_draw=drafts.target_token_ids is not None)
        return keep_valid(drafts, infos) if plan.grammar_ids else drafts

    def _keep(self, drafts: DraftBatch, record: StepRecord, *, waits: bool) -> None:
        """Keep drafts for the next step, and commit tokens that the drafting pass drew from the target's law."""
        rows = record.batch.rows
        drawn = [] if drafts.target_token_ids is None else [drafts.target_token_ids.to(rows.device)]
        record.drafted = self.downloads.start(drafts.num_nodes, *drawn)
        if waits:
            record.settle_drafted()
        self.state.store_drafts(record.infos, rows, drafts)
        for token_ids in drawn:
            commit_target_tokens(self.state, rows, token_ids)

    def _view(
        self,
        infos: list[RowInfo],
        batch: InputBatch,
        verified: VerifyResult,
        *,
        taps: Mapping[Tap, torch.Tensor],
        max_nodes: list[int],
        sources: list[str | None],
    ) -> StepView:
        return StepView(
            request_ids=batch.request_ids,
            rows=batch.rows,
            cu_query_lens=batch.cu_query_lens,
            target_token_ids=batch.input_ids,
            target_positions=batch.positions,
            path=verified.path,
            sampled_token_ids=verified.token_ids,
            num_sampled=verified.num_sampled,
            num_rejected=verified.num_rejected,
            num_computed=self.state.num_computed[batch.rows],
            token_ids=self.state.token_ids,
            num_tokens=self.state.num_tokens,
            max_nodes=max_nodes,
            sources=sources,
            can_draw_target=[n > 0 and _is_plain(info.sampling) for n, info in zip(max_nodes, infos, strict=True)],
            taps=taps,
            block_table=batch.block_table,
            sampling=self._draft_sampling(batch.rows, infos),
        )

    def _room(self, info: RowInfo) -> int:
        """Drafts that end in time for the target to emit one more token at the last position."""
        max_model_len = self.state.token_ids.shape[1] - 1
        return max(max_model_len - 1 - info.num_tokens, 0)

    def _draft_sampling(self, rows: torch.Tensor, infos: list[RowInfo]) -> DraftSampling:
        state = self.state
        matchers = {index: info.matcher for index, info in enumerate(infos) if info.matcher is not None}
        return DraftSampling(
            temperature=state.temperature[rows],
            seed=state.seed[rows],
            top_k=state.top_k[rows],
            top_p=state.top_p[rows],
            token_mask=DraftMasks(matchers, len(infos), device=rows.device) if matchers else None,
        )


def _reads_host(info: RowInfo) -> bool:
    """Whether the request's rows, or what it is told of them, depend on tokens that the host must know first."""
    sampling = info.sampling
    asks = sampling.logprobs is not None or sampling.prompt_logprobs is not None or info.track_drafts
    return asks or info.matcher is not None or info.parents is not None or needs_processing(sampling)


def _is_plain(sampling: SamplingParams) -> bool:
    """True when logits alone decide a draw and nothing about it is reported, so that a proposer's pass may draw for the target."""
    return not needs_processing(sampling) and sampling.logprobs is None and sampling.structured is None


def build_metadata_factory(device: torch.device, paged_attention: Attend | None = None) -> object:
    """Return DraftRail.build_attention for the device and the attention backend that was asked for."""

    def build(
        *,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
        tree_mask: torch.Tensor | None = None,
        is_causal: bool = True,
    ) -> AttentionMetadata:
        cu_query_lens = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
        cu_query_lens[1:] = torch.tensor(query_lens).cumsum(0)
        return AttentionMetadata(
            cu_query_lens=cu_query_lens.to(device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_table=block_table,
            slot_mapping=slot_mapping,
            query_lens_cpu=tuple(query_lens),
            seq_lens_cpu=tuple(seq_lens),
            tree_mask=tree_mask,
            is_causal=is_causal,
            paged_attention=paged_attention,
        )

    return build
