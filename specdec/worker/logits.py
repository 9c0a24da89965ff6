"""Logits processors: what a request changes in the target's logits before the law is formed, at every row of its block.

Owns: allowed ids, bad words, min_tokens, bias and penalties; a row sees the drafts before it as if they were emitted.
Must not know: temperature and cuts (kernels), verification. Letters: L logits rows, V vocabulary.
"""

from __future__ import annotations

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


def process_row(logits: torch.Tensor, sampling: SamplingParams, *, prompt: Sequence[int], output: Sequence[int], stop_ids: Sequence[int]) -> None:
    """Change one row of logits [V] in place, given the prompt and the output before it (drafts of the block included).

    Order as in vLLM: allowed ids, bad words, min_tokens, bias, then penalties. stop_ids end the request when drawn.
    """
    if sampling.allowed_token_ids is not None:
        _keep_only(logits, sampling.allowed_token_ids)
    for word in sampling.bad_words_token_ids:
        if _completes(word, output):
            logits[word[-1]] = -torch.inf
    if len(output) < sampling.min_tokens and stop_ids:
        logits[list(stop_ids)] = -torch.inf
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(sampling.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    _penalise(logits, sampling, prompt=prompt, output=output)


def _keep_only(logits: torch.Tensor, allowed: Sequence[int]) -> None:
    ids = torch.tensor(allowed, device=logits.device)
    kept = logits[ids]
    logits.fill_(-torch.inf)
    logits[ids] = kept


def _completes(word: Sequence[int], output: Sequence[int]) -> bool:
    prefix = tuple(word[:-1])
    return not prefix or tuple(output[-len(prefix) :]) == prefix


def _penalise(logits: torch.Tensor, sampling: SamplingParams, *, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Repetition over prompt and output (divide positive logits, multiply negative ones), presence and frequency over output."""
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *output}), dtype=torch.int64, device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if not output or not (sampling.presence_penalty or sampling.frequency_penalty):
        return
    ids, counts = torch.tensor(output, dtype=torch.int64, device=logits.device).unique(return_counts=True)
    logits[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
