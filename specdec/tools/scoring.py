"""Scorer: the target's processed law at every position of a finished text, by teacher forcing.

Owns: one cache for one sequence, and penalties written a second time, independently of the worker. Must not know: drafts.
Letters: n rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from specdec.kernels.reference import target_law
from specdec.models.attention import AttentionMetadata, allocate_kv
from specdec.models.registry import TargetModel
from specdec.sampling_params import SamplingParams

ROWS_AT_ONCE = 64  # laws held at once: 64 rows of 49,152 doubles are 25 MB
BLOCK_SIZE = 16


class Scorer:
    """Runs the served model, with its own weights and dtype, over known tokens."""

    def __init__(self, model: TargetModel, *, max_len: int) -> None:
        self._model = model
        self._num_blocks = -(-max_len // BLOCK_SIZE)
        shape = (self._num_blocks, BLOCK_SIZE, *model.kv_shape())
        self._kv = allocate_kv(model.num_layers, shape, dtype=model.dtype, device=model.device)

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of the first output token, [n, V] float32 on the CPU): the logits that each output token was drawn from."""
        tokens = [*prompt, *output][:-1]
        hidden = self._hidden(tokens)[len(prompt) - 1 :]
        for first in range(0, len(output), ROWS_AT_ONCE):
            yield first, self._model.compute_logits(hidden[first : first + ROWS_AT_ONCE]).float().cpu()

    def laws(self, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams) -> Iterator[tuple[int, torch.Tensor]]:
        """As `logits`, but the law [n, V] float64 that plain sampling draws each output token from."""
        for first, rows in self.logits(prompt, output):
            yield first, processed_law(rows, sampling, prompt=prompt, output=output, first=first)

    def _hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        device, count = self._model.device, len(tokens)
        positions = torch.arange(count, device=device)
        meta = AttentionMetadata(
            cu_query_lens=torch.tensor([0, count], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
            block_table=torch.arange(self._num_blocks, dtype=torch.int32, device=device)[None],
            slot_mapping=positions,
            query_lens_cpu=(count,),
            seq_lens_cpu=(count,),
        )
        hidden, _ = self._model.forward(torch.tensor(tokens, device=device), positions, self._kv, meta)
        return hidden


def processed_law(
    logits: torch.Tensor, sampling: SamplingParams, *, prompt: Sequence[int], output: Sequence[int], first: int
) -> torch.Tensor:
    """Return the law [n, V] float64 of output tokens first..first+n-1, given logits [n, V]: penalties, temperature, cuts."""
    laws = torch.zeros(logits.shape, dtype=torch.float64)
    for index, row in enumerate(logits):
        wide = penalised(row.double(), sampling, prompt=prompt, output=output[: first + index])
        ids = _support(wide, sampling.top_k)
        laws[index, ids] = target_law(
            wide[ids][None],
            temperature=torch.tensor([sampling.temperature]),
            top_k=torch.tensor([sampling.top_k]),
            top_p=torch.tensor([sampling.top_p]),
            min_p=torch.tensor([sampling.min_p]),
        )[0]
    return laws


def penalised(logits: torch.Tensor, sampling: SamplingParams, *, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """Return logits [V] after the penalties for what was said before: repetition counts the prompt too, the others do not."""
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=len(logits)).to(logits.dtype)
    seen = counts > 0
    seen[torch.tensor(prompt, dtype=torch.int64)] = True
    factor = torch.where(logits > 0, 1.0 / sampling.repetition_penalty, sampling.repetition_penalty)
    scaled = torch.where(seen, logits * factor, logits)
    return scaled - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


def _support(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Ids that top-k keeps, ties at its border included: the others have no mass, and sorting them is what takes time."""
    if not 0 < top_k < len(logits):
        return torch.arange(len(logits))
    return (logits >= logits.topk(top_k).values[-1]).nonzero().squeeze(1)
