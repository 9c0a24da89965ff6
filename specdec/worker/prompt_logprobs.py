"""Log-probabilities of prompt tokens, chunk by chunk, for the requests that asked.

Owns: which rows of a chunk score which prompt token. Must not know: sampling.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from specdec.models.registry import TargetModel
from specdec.scheduler.output import TokenLogprobs
from specdec.worker.input_batch import InputBatch
from specdec.worker.logprobs import token_logprobs
from specdec.worker.request_state import RequestState, RowInfo

ROWS_AT_ONCE = 256  # bounds the logits held for scoring: 256 rows of 49,152 floats are 50 MB


def prompt_logprobs(
    model: TargetModel, state: RequestState, infos: list[RowInfo], batch: InputBatch, *, hidden: torch.Tensor
) -> dict[int, tuple[TokenLogprobs | None, ...]]:
    """Score the prompt tokens whose law this step's rows hold; the very first prompt token has no law and gets None."""
    scored = {}
    starts = [0, *accumulate(batch.query_lens_cpu)]
    for index, info in enumerate(infos):
        before = batch.seq_lens_cpu[index] - batch.query_lens_cpu[index]
        if info.sampling.prompt_logprobs is None or before >= info.num_prompt_tokens:
            continue
        end = min(batch.seq_lens_cpu[index] + 1, info.num_prompt_tokens)  # row j scores token j + 1
        tokens = state.token_ids[info.row, before + 1 : end].tolist()
        rows = hidden[starts[index] : starts[index] + len(tokens)]
        records: list[TokenLogprobs | None] = [None] if before == 0 else []
        for start in range(0, len(tokens), ROWS_AT_ONCE):
            logits = model.compute_logits(rows[start : start + ROWS_AT_ONCE])
            records += token_logprobs(logits, tokens[start : start + ROWS_AT_ONCE], info.sampling.prompt_logprobs)
        scored[index] = tuple(records)
    return scored
