"""Logits processors: what a request changes in the target's logits before the law is formed, at every row of its block.

Owns: allowed ids, bad words, min_tokens, bias and penalties; a row sees the drafts before it as if they were emitted.
Must not know: temperature and cuts (kernels), verification. Letters: L logits rows, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from specdec.sampling_params import SamplingParams


def needs_processing(sampling: SamplingParams) -> bool:
    """True when any processor has an effect, so that a plain request costs nothing."""
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.logit_bias
        or sampling.allowed_token_ids is not None
        or sampling.bad_words_token_ids
        or sampling.min_tokens
    )


def process_block(
    logits: torch.Tensor,
    sampling: SamplingParams,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    paths: Sequence[Sequence[int]],
    stop_ids: Sequence[int],
) -> None:
    """Change one request's rows of logits [n, V] in place; paths[i] holds the drafts before row i, which count as emitted.

    Order as in vLLM: allowed ids, bad words, min_tokens, bias, then penalties. stop_ids end the request when drawn.
    """
    if sampling.allowed_token_ids is not None:
        _keep_only(logits, sampling.allowed_token_ids)
    if sampling.bad_words_token_ids:
        for row, path in zip(logits, paths, strict=True):
            _forbid_completions(row, sampling.bad_words_token_ids, [*output, *path])
    if sampling.min_tokens and stop_ids:
        early = [i for i, path in enumerate(paths) if len(output) + len(path) < sampling.min_tokens]
        if sampling.structured is not None:  # a grammar that is complete allows nothing but an end
            early = [i for i in early if not _must_end(logits[i], stop_ids)]
        logits[torch.tensor(early, dtype=torch.int64)[:, None], torch.tensor(list(stop_ids))] = -torch.inf
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=logits.device)
        logits[:, ids] += torch.tensor(list(sampling.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    if sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty:
        _penalise(logits, sampling, prompt=prompt, output=output, paths=paths)


def _keep_only(logits: torch.Tensor, allowed: Sequence[int]) -> None:
    ids = torch.tensor(allowed, device=logits.device)
    kept = logits[:, ids]
    logits.fill_(-torch.inf)
    logits[:, ids] = kept


def _must_end(row: torch.Tensor, stop_ids: Sequence[int]) -> bool:
    is_open = torch.isfinite(row)
    is_open[list(stop_ids)] = False
    return not bool(is_open.any())


def _forbid_completions(row: torch.Tensor, words: Sequence[Sequence[int]], output: Sequence[int]) -> None:
    last = [word[-1] for word in words if len(word) == 1 or list(output[-len(word) + 1 :]) == list(word[:-1])]
    if last:
        row[last] = -torch.inf


def _penalise(
    logits: torch.Tensor, sampling: SamplingParams, *, prompt: Sequence[int], output: Sequence[int], paths: Sequence[Sequence[int]]
) -> None:
    """Repetition over prompt and output (divide positive logits, multiply negative ones), presence and frequency over output.

    All in one gather and one scatter of the ids that occur anywhere; counts grow along each path.
    """
    base = Counter(output)
    in_prompt = set(prompt) if sampling.repetition_penalty != 1.0 else set()
    ids = sorted({*base, *in_prompt, *(draft for path in paths for draft in path)})
    if not ids:
        return
    column = {token: i for i, token in enumerate(ids)}
    counts = torch.tensor([[float(base[token]) for token in ids]]).repeat(len(paths), 1)  # [n, ids]
    for row, path in enumerate(paths):
        for draft in path:
            counts[row, column[draft]] += 1.0
    index, counts = torch.tensor(ids, device=logits.device), counts.to(logits.device)
    values = logits[:, index]
    if sampling.repetition_penalty != 1.0:
        seen = (counts > 0) | torch.tensor([token in in_prompt for token in ids], device=logits.device)
        values = torch.where(seen, _repeated(values, sampling.repetition_penalty), values)
    logits[:, index] = values - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


def _repeated(values: torch.Tensor, penalty: float) -> torch.Tensor:
    return torch.where(values > 0, values / penalty, values * penalty)
