"""ModelRunner: executes one step. Gather, forward, verify, commit rows, propose, in that order and in one place.

Owns: the step on the device. Must not know: queues, text, or which draft method it holds.
Read next: batch_builder.py, sampler.py, proposers/base.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from specdec.config.methods import Tap
from specdec.models.attention import AttentionMetadata, KVPair
from specdec.models.registry import TargetModel
from specdec.proposers.base import AdmitInfo, DraftBatch, DraftSampling, Proposer, StepView
from specdec.sampling_params import SamplingParams
from specdec.scheduler.output import ModelRunnerOutput, RequestOutput, SchedulerOutput, StepTimings, TokenLogprobs
from specdec.structured.mask import DraftMasks
from specdec.worker.batch_builder import attention_metadata, build_batch
from specdec.worker.grammar_step import advance_matchers, keep_valid
from specdec.worker.input_batch import InputBatch, VerifyResult
from specdec.worker.logits import needs_processing
from specdec.worker.post_update import commit_rows, commit_target_tokens, compact_kv
from specdec.worker.prompt_logprobs import prompt_logprobs
from specdec.worker.request_state import RequestState, RowInfo
from specdec.worker.sampler import Sampler
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
    ) -> None:
        self.model, self.kv, self.state, self.sampler, self.proposer = model, kv, state, sampler, proposer
        self.block_size, self.weights = block_size, weights
        self.num_blocks = kv[0][0].shape[0]
        self._taps: tuple[Tap, ...] = proposer.traits.taps if proposer else ()

    @property
    def corpora(self) -> Any:
        """The proposer's shelf of texts to draft from, where it has one."""
        return getattr(self.proposer, "corpora", None)

    @property
    def drafter_bytes(self) -> int:
        """Host memory of a proposer that grows with what it reads."""
        return int(getattr(self.proposer, "num_bytes", 0))

    @property
    def drafter_faults(self) -> Mapping[str, int]:
        """Faults of the user's own code by kind."""
        return dict(getattr(self.proposer, "faults", {}))

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and return what every scheduled request emitted."""
        start_s = perf_counter()
        self._apply(plan)
        if not plan.num_scheduled_tokens:
            return ModelRunnerOutput(results={}, epoch=plan.epoch, num_rows=0)
        infos, batch = build_batch(plan, self.state, block_size=self.block_size)
        meta = attention_metadata(batch, infos)
        prepared_s = perf_counter()
        hidden, taps = self.model.forward(batch.input_ids, batch.positions, self.kv, meta, taps=self._taps)  # [N, H]
        logits = self.model.compute_logits(hidden[batch.logits_indices])  # [L, V] f32
        forwarded_s = perf_counter()
        verified, raw = self.sampler.verify(logits, batch, infos)
        results = self._results(infos, batch, verified, logprobs=self.sampler.logprobs(raw, verified, infos), hidden=hidden)
        if batch.parents is not None:
            compact_kv(self.kv, batch, verified)
        commit_rows(self.state, infos, batch, verified)
        if plan.grammar_ids:
            results = advance_matchers(infos, results)
        verified_s = perf_counter()
        if self.proposer is not None:
            drafts = self._propose(self.proposer, plan, infos, batch, verified=verified, taps=taps)
            if plan.grammar_ids:
                drafts = keep_valid(drafts, infos)
            results = self._store(drafts, infos, batch, results)
        timings = StepTimings(
            prepare_s=prepared_s - start_s,
            forward_s=forwarded_s - prepared_s,
            verify_s=verified_s - forwarded_s,
            propose_s=perf_counter() - verified_s,
        )
        return ModelRunnerOutput(results=results, epoch=plan.epoch, num_rows=sum(batch.query_lens_cpu), timings=timings)

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

    def _results(
        self,
        infos: list[RowInfo],
        batch: InputBatch,
        verified: VerifyResult,
        *,
        logprobs: Mapping[int, tuple[TokenLogprobs, ...]],
        hidden: torch.Tensor,
    ) -> dict[str, RequestOutput]:
        counts = torch.stack((verified.num_sampled, verified.num_drafts, verified.num_invalid)).tolist()
        tokens = verified.token_ids.tolist()
        of_prompt = prompt_logprobs(self.model, self.state, infos, batch, hidden=hidden)
        results = {}
        for index, (info, sampled, tested, invalid) in enumerate(zip(infos, *counts, strict=True)):
            failed = sampled == 0 and batch.num_logits_cpu[index] > 0
            results[info.request_id] = RequestOutput(
                token_ids=tuple(tokens[index][:sampled]),
                num_drafts=tested,
                num_invalid=invalid,
                is_lossy=self.sampler.rule.is_lossy and tested > 0,
                source=info.source if batch.num_drafts_cpu[index] else "",
                draft_token_ids=self._drafts_of(info, batch.num_drafts_cpu[index]),
                logprobs=logprobs.get(index),
                prompt_logprobs=of_prompt.get(index),
                error="no token has a finite logit (numerical failure, or every token is forbidden)" if failed else None,
            )
        return results

    def _drafts_of(self, info: RowInfo, count: int) -> tuple[int, ...]:
        return tuple(self.state.draft_token_ids[info.row, :count].tolist()) if count and info.track_drafts else ()

    def _propose(
        self,
        proposer: Proposer,
        plan: SchedulerOutput,
        infos: list[RowInfo],
        batch: InputBatch,
        *,
        verified: VerifyResult,
        taps: Mapping[Tap, torch.Tensor],
    ) -> DraftBatch:
        """Let the proposer extend its state and draft for the next step, within what was ordered."""
        orders = [plan.drafts_next.get(info.request_id) for info in infos]
        max_nodes = [min(order.max_nodes, self._room(info)) if order else 0 for order, info in zip(orders, infos, strict=True)]
        drafts = proposer.propose(
            StepView(
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
                sources=[order.source if order else None for order in orders],
                can_draw_target=[n > 0 and _is_plain(info.sampling) for n, info in zip(max_nodes, infos, strict=True)],
                taps=taps,
                block_table=batch.block_table,
                sampling=self._draft_sampling(batch.rows, infos),
            )
        )
        _check_drafts(drafts, max_nodes)
        return drafts

    def _room(self, info: RowInfo) -> int:
        """Drafts that end in time for the target to emit one more token at the last position."""
        max_model_len = self.state.token_ids.shape[1] - 1
        return max(max_model_len - 1 - info.num_tokens, 0)

    def _store(
        self, drafts: DraftBatch, infos: list[RowInfo], batch: InputBatch, results: dict[str, RequestOutput]
    ) -> dict[str, RequestOutput]:
        """Keep the drafts for the next step and commit tokens that the drafting pass drew from the target's law."""
        num_nodes: list[int] = drafts.num_nodes.tolist()
        self.state.store_drafts(infos, batch.rows, drafts, num_nodes)
        drawn = [-1] * len(infos)
        if drafts.target_token_ids is not None:
            drawn = commit_target_tokens(self.state, infos, batch.rows, drafts.target_token_ids)
        stored = {}
        for (request_id, result), count, token in zip(results.items(), num_nodes, drawn, strict=True):
            if token >= 0:
                result = replace(result, token_ids=(*result.token_ids, token), num_target_tokens=1)
            stored[request_id] = replace(result, num_next=count) if count else result
        return stored

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


def _check_drafts(drafts: DraftBatch, max_nodes: Sequence[int]) -> None:
    counts: list[int] = drafts.num_nodes.tolist()
    assert len(counts) == len(max_nodes), f"the proposer answered for {len(counts)} of {len(max_nodes)} requests"
    for index, (count, limit) in enumerate(zip(counts, max_nodes, strict=True)):
        assert 0 <= count <= limit, f"the proposer drafted {count} tokens for request {index}, but at most {limit} were ordered"


def _is_plain(sampling: SamplingParams) -> bool:
    """True when logits alone decide a draw and nothing about it is reported, so that a proposer's pass may draw for the target."""
    return not needs_processing(sampling) and sampling.logprobs is None and sampling.structured is None


def build_metadata_factory(device: torch.device) -> object:
    """Return DraftRail.build_attention for the device."""

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
        )

    return build
