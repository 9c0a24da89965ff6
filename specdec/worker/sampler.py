"""Sampler: from the target's logits of a step to the tokens each request emits.

Owns: the order logits -> grammars -> processors -> verification, and putting the groups of a batch together again. Must not
know: the model, the proposer, or how a rule decides. Read next: logits.py, draft_laws.py, rules.py.
Letters: R requests, L logits rows, K draft nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from specdec.kernels.dispatch import kernel
from specdec.kernels.philox import PURPOSE_TARGET
from specdec.kernels.transfers import upload
from specdec.kernels.verified import Verified
from specdec.scheduler.output import TokenLogprobs
from specdec.structured.mask import block_mask, forbid
from specdec.worker.draft_laws import RequestGroup, group_requests, join_laws
from specdec.worker.input_batch import INVALID_TOKEN, InputBatch, VerifyResult
from specdec.worker.logits import needs_processing, process_block
from specdec.worker.logprobs import token_logprobs
from specdec.worker.request_state import RequestState, RowInfo
from specdec.worker.rules import Part, VerifyRule, match_exactly, run_rule


@dataclass(frozen=True, slots=True)
class RawRows:
    """Unprocessed logits of the requests that asked for log-probabilities, by batch index: [rows, V] each."""

    by_request: dict[int, torch.Tensor]


class Sampler:
    """Draws with named noise, so that a row's result depends on nothing but its own logits and, for sampled drafts, its drafts.

    num_grammar_copies: steps whose drafts were copied to the host for a grammar, those with a structured request.
    """

    def __init__(self, state: RequestState, *, eos_token_ids: Sequence[int], rule: VerifyRule | None = None) -> None:
        self.state = state
        self.eos_token_ids = tuple(eos_token_ids)
        self.rule = rule or VerifyRule()
        self.num_grammar_copies = 0

    def verify(self, logits: torch.Tensor, batch: InputBatch, infos: list[RowInfo]) -> tuple[VerifyResult, RawRows]:
        """Verify the batch's drafts by the configured rule; logits [L, V] float32 are consumed."""
        drafts = self.draft_matrix(batch)
        raw = self._keep_raw(logits, batch, infos)
        if any(info.matcher is not None for info in infos):
            self._constrain(logits, batch, infos, drafts)
        self._process(logits, batch, infos, drafts)
        groups = group_requests(infos, batch.num_drafts_cpu, rule=self.rule)
        parts = [self._part(group, logits, drafts, batch, infos) for group in groups]
        verified = [self._verify_part(group, part) for group, part in zip(groups, parts, strict=True)]
        return VerifyResult(**_merge(groups, verified, len(infos))._asdict()), raw

    def sample_target(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draw from the target's law with the target's own noise: logits [L, V], persistent rows [L], positions [L] -> ids [L]."""
        cuts = self._cuts(rows)
        if self.state.is_greedy:
            u = cuts["temperature"]  # greedy rows read no noise
        else:
            u = kernel("uniform", rows.device)(self.state.seed[rows], positions, purpose=PURPOSE_TARGET)
        ids: torch.Tensor = kernel("sample_logits", rows.device)(logits, u, **cuts)
        return ids

    def draft_matrix(self, batch: InputBatch) -> torch.Tensor:
        """[R, K] drafts under test, INVALID_TOKEN where a request has fewer than the widest."""
        width = max(batch.num_drafts_cpu, default=0)
        drafts = self.state.draft_token_ids[batch.rows, :width]
        unused = torch.arange(width, device=drafts.device)[None] >= batch.num_drafts[:, None]
        return drafts.masked_fill(unused, INVALID_TOKEN)

    def logits_rows(self, batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(persistent row [L], position [L]) of every logits row; the position names the noise of the draw made there."""
        counts = upload(batch.num_logits_cpu, batch.rows.device)
        return torch.repeat_interleave(batch.rows, counts, output_size=sum(batch.num_logits_cpu)), batch.positions[batch.logits_indices]

    def logprobs(self, raw: RawRows, verified: VerifyResult, infos: list[RowInfo]) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Log-probabilities of the emitted tokens, by batch index, for the requests that asked."""
        result = {}
        for index, rows in raw.by_request.items():
            count = int(verified.num_sampled[index])
            kept = rows[verified.path[index, :count]]
            result[index] = token_logprobs(kept, verified.token_ids[index, :count].tolist(), infos[index].sampling.logprobs or 0)
        return result

    def _cuts(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state
        return {
            "temperature": state.temperature[rows],
            "top_k": state.top_k[rows],
            "top_p": state.top_p[rows],
            "min_p": state.min_p[rows],
        }

    def _part(self, group: RequestGroup, logits: torch.Tensor, drafts: torch.Tensor, batch: InputBatch, infos: list[RowInfo]) -> Part:
        """Cut a group's rows out of the batch; the whole batch is not copied."""
        rows, positions = self.logits_rows(batch)
        cu_num_logits, trees = batch.cu_num_logits, batch.parents is not None
        if len(group.requests) < len(infos):
            starts = [0, *accumulate(batch.num_logits_cpu)]
            counts = [batch.num_logits_cpu[index] for index in group.requests]
            chosen = [i for index, n in zip(group.requests, counts, strict=True) for i in range(starts[index], starts[index] + n)]
            kept = upload(chosen, logits.device)
            logits, rows, positions = logits[kept], rows[kept], positions[kept]
            drafts = drafts[upload(group.requests, drafts.device)]
            cu_num_logits = upload([0, *accumulate(counts)], logits.device, dtype=torch.int32)
        anchor = cu_num_logits[:-1].long().clamp(max=max(len(positions) - 1, 0))  # a request without rows draws nothing
        has_rows = len(positions) > 0
        return Part(
            logits=logits,
            rows=rows,
            positions=positions,
            drafts=drafts,
            cu_num_logits=cu_num_logits,
            parents=_parent_matrix([infos[index] for index in group.requests], drafts.shape[1]).to(drafts.device) if trees else None,
            seed=self.state.seed[rows[anchor]] if has_rows else torch.zeros_like(anchor),
            anchor=positions[anchor] if has_rows else anchor,
            cuts=self._cuts(rows),
        )

    def _verify_part(self, group: RequestGroup, part: Part) -> Verified:
        if group.by_match:
            return match_exactly(part, self.sample_target)
        draft_logits, draft_ids = join_laws(group.laws, part.drafts.shape[1])
        return run_rule(self.rule, part, self.sample_target, draft_logits=draft_logits, draft_ids=draft_ids)

    def _keep_raw(self, logits: torch.Tensor, batch: InputBatch, infos: list[RowInfo]) -> RawRows:
        kept, start = {}, 0
        for index, (info, count) in enumerate(zip(infos, batch.num_logits_cpu, strict=True)):
            if count and info.sampling.logprobs is not None:
                kept[index] = logits[start : start + count].clone()
            start += count
        return RawRows(kept)

    def _constrain(self, logits: torch.Tensor, batch: InputBatch, infos: list[RowInfo], drafts: torch.Tensor) -> None:
        """Apply the grammars, in place: what they forbid at a row becomes -inf, a draft they forbid INVALID_TOKEN.

        A draft that was drawn from a law stays, to be refused by the rule: taking it out would leave its share of the law to the
        others, while the rule gives it to the residual.
        """
        self.num_grammar_copies += batch.num_drafts_cpu.count(0) < len(infos)
        on_host = drafts.tolist()
        start = 0
        for index, (info, count) in enumerate(zip(infos, batch.num_logits_cpu, strict=True)):
            if count and info.matcher is not None:
                mask, allowed = block_mask(info.matcher, on_host[index][: count - 1], info.parents)
                forbid(logits[start : start + count], mask)
                if info.law is None or self.rule.is_lossy:
                    drafts[index, [node for node, is_allowed in enumerate(allowed) if not is_allowed]] = INVALID_TOKEN
            start += count

    def _process(self, logits: torch.Tensor, batch: InputBatch, infos: list[RowInfo], drafts: torch.Tensor) -> None:
        start = 0
        for index, (info, count) in enumerate(zip(infos, batch.num_logits_cpu, strict=True)):
            if count and needs_processing(info.sampling):
                self._process_request(logits[start : start + count], info, drafts[index, : count - 1].tolist())
            start += count

    def _process_request(self, logits: torch.Tensor, info: RowInfo, drafts: list[int]) -> None:
        """Row i sees the drafts on its path; only rows after kept drafts matter, and those saw the right history."""
        prompt, output = info.token_ids[: info.num_prompt_tokens], info.token_ids[info.num_prompt_tokens :]
        sampling = info.sampling
        stop_ids = [*([] if sampling.ignore_eos else self.eos_token_ids), *sampling.stop_token_ids]
        paths: list[list[int]] = [[]]
        for node, draft in enumerate(drafts):
            above = paths[node if info.parents is None else info.parents[node] + 1]
            paths.append([*above, draft] if draft >= 0 else above)
        process_block(logits, sampling, prompt=prompt, output=output, paths=paths, stop_ids=stop_ids)


def _merge(groups: Sequence[RequestGroup], verified: Sequence[Verified], num_requests: int) -> Verified:
    """Put the groups' results back into batch order."""
    if len(groups) == 1:
        return verified[0]
    merged = []
    for fields in zip(*verified, strict=True):
        whole = fields[0].new_empty((num_requests, *fields[0].shape[1:]))
        for group, field in zip(groups, fields, strict=True):
            whole[upload(group.requests, whole.device)] = field
        merged.append(whole)
    return Verified(*merged)


def _parent_matrix(infos: list[RowInfo], width: int) -> torch.Tensor:
    """[R, K]: the tree of each request, chains included."""
    chain = list(range(-1, width - 1))
    rows = [chain if info.parents is None else (info.parents + [-1] * width)[:width] for info in infos]
    return torch.tensor(rows, dtype=torch.int64)
