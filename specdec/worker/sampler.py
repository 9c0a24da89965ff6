"""Sampler: from the target's logits of a step to the tokens each request emits.

Owns: the order logits -> processors -> the target's own draws -> verification. Must not know: the model or the proposer.
Letters: R requests, L logits rows, K draft nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.kernels.cpu.sampling import sample_logits
from specdec.kernels.cpu.verification import verify_coupled
from specdec.kernels.philox import PURPOSE_TARGET, uniform
from specdec.scheduler.output import TokenLogprobs
from specdec.worker.input_batch import INVALID_TOKEN, InputBatch, VerifyResult
from specdec.worker.logits import needs_processing, process_row
from specdec.worker.logprobs import token_logprobs
from specdec.worker.request_state import RequestState, RowInfo


@dataclass(frozen=True, slots=True)
class RawRows:
    """Unprocessed logits of the requests that asked for log-probabilities, by batch index: [rows, V] each."""

    by_request: dict[int, torch.Tensor]


class Sampler:
    """Draws with noise keyed by (seed, position), so that a row's result depends on nothing but its own logits."""

    def __init__(self, state: RequestState, *, eos_token_ids: Sequence[int]) -> None:
        self.state = state
        self.eos_token_ids = tuple(eos_token_ids)

    def verify(self, logits: torch.Tensor, batch: InputBatch, infos: list[RowInfo]) -> tuple[VerifyResult, RawRows]:
        """Verify the batch's drafts by exact match with the target's own samples; logits [L, V] float32 are consumed."""
        drafts = self.draft_matrix(batch)
        raw = self._keep_raw(logits, batch, infos)
        self._process(logits, batch, infos, drafts)
        rows, positions = self.logits_rows(batch)
        targets = self.sample_target(logits, rows, positions)
        parents = _parent_matrix(infos, drafts.shape[1]) if batch.parents is not None else None
        verified = verify_coupled(targets, drafts, cu_num_logits=batch.cu_num_logits, parents=parents)
        return VerifyResult(**verified._asdict()), raw

    def sample_target(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draw from the target's law with the target's own noise: logits [L, V], persistent rows [L], positions [L] -> ids [L]."""
        state = self.state
        u = uniform(state.seed[rows], positions, purpose=PURPOSE_TARGET)
        return sample_logits(
            logits, u, temperature=state.temperature[rows], top_k=state.top_k[rows], top_p=state.top_p[rows], min_p=state.min_p[rows]
        )

    def draft_matrix(self, batch: InputBatch) -> torch.Tensor:
        """[R, K] drafts under test, INVALID_TOKEN where a request has fewer than the widest."""
        width = max(batch.num_drafts_cpu, default=0)
        drafts = self.state.draft_token_ids[batch.rows, :width]
        unused = torch.arange(width, device=drafts.device)[None] >= batch.num_drafts[:, None]
        return drafts.masked_fill(unused, INVALID_TOKEN)

    def logits_rows(self, batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(persistent row [L], position [L]) of every logits row; the position names the noise of the draw made there."""
        counts = torch.tensor(batch.num_logits_cpu, device=batch.rows.device)
        return torch.repeat_interleave(batch.rows, counts, output_size=sum(batch.num_logits_cpu)), batch.positions[batch.logits_indices]

    def logprobs(self, raw: RawRows, verified: VerifyResult, infos: list[RowInfo]) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Log-probabilities of the emitted tokens, by batch index, for the requests that asked."""
        result = {}
        for index, rows in raw.by_request.items():
            count = int(verified.num_sampled[index])
            kept = rows[verified.path[index, :count]]
            result[index] = token_logprobs(kept, verified.token_ids[index, :count].tolist(), infos[index].sampling.logprobs or 0)
        return result

    def _keep_raw(self, logits: torch.Tensor, batch: InputBatch, infos: list[RowInfo]) -> RawRows:
        kept, start = {}, 0
        for index, (info, count) in enumerate(zip(infos, batch.num_logits_cpu, strict=True)):
            if count and info.sampling.logprobs is not None:
                kept[index] = logits[start : start + count].clone()
            start += count
        return RawRows(kept)

    def _process(self, logits: torch.Tensor, batch: InputBatch, infos: list[RowInfo], drafts: torch.Tensor) -> None:
        start = 0
        for index, (info, count) in enumerate(zip(infos, batch.num_logits_cpu, strict=True)):
            if count and needs_processing(info.sampling):
                self._process_request(logits[start : start + count], info, drafts[index, : count - 1].tolist())
            start += count

    def _process_request(self, logits: torch.Tensor, info: RowInfo, drafts: list[int]) -> None:
        """Row i sees the drafts on its path; only rows after kept drafts matter, and those saw the right history."""
        history = self.state.token_ids[info.row, : info.num_tokens].tolist()
        prompt, output = history[: info.num_prompt_tokens], history[info.num_prompt_tokens :]
        sampling = info.sampling
        stop_ids = [*([] if sampling.ignore_eos else self.eos_token_ids), *sampling.stop_token_ids]
        paths: list[list[int]] = [[]]
        for node, draft in enumerate(drafts):
            above = node if info.parents is None else info.parents[node] + 1
            paths.append([*paths[above], draft])
        for row, path in enumerate(paths):
            process_row(logits[row], sampling, prompt=prompt, output=[*output, *(d for d in path if d >= 0)], stop_ids=stop_ids)


def _parent_matrix(infos: list[RowInfo], width: int) -> torch.Tensor:
    """[R, K]: the tree of each request, chains included."""
    chain = list(range(-1, width - 1))
    rows = [chain if info.parents is None else (info.parents + [-1] * width)[:width] for info in infos]
    return torch.tensor(rows, dtype=torch.int64)
