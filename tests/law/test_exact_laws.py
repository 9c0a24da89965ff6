"""Exact enumeration with request parameters: the law that the sampler builds at every row is the law that the rules emit, to 1e-12.

The target is a table of logits per prefix. Its rows go through the processors and cuts that the worker uses, with the drafts before a
row counted as emitted; the stream must then follow the law of plain decoding, which sees the same prefix as output.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from specdec.kernels.reference import target_law
from specdec.kernels.rules import BLOCK, STANDARD, Rule
from specdec.sampling_params import SamplingParams
from specdec.worker.logits import process_block
from tests.kernels.test_rule_laws import EXACT, Model, distance, one_hot_model, random_model, stream_law

VOCAB = 4
PROMPT = [1, 1, 3]
PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.4},
    "all cuts": {"temperature": 1.4, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.7},
    "presence and frequency": {"presence_penalty": 1.1, "frequency_penalty": 0.6},
    "penalties and cuts": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 1.0, "top_p": 0.8},
    "bad words": {"bad_words_token_ids": ((2,), (0, 1), (3, 3))},
    "allowed and bias": {"allowed_token_ids": (0, 1, 3), "logit_bias": {0: 1.5, 3: -2.0}},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": (0, 2)},
}


def logits_after(prefix: tuple[int, ...]) -> torch.Tensor:
    return random_model(VOCAB, seed=21)(prefix).log().clamp_min(-6).float()


def plain_target(sampling: SamplingParams) -> Model:
    """The law of plain decoding after `prefix`: one row, the prefix is its output."""

    @cache
    def law(prefix: tuple[int, ...]) -> torch.Tensor:
        rows = logits_after(prefix)[None].clone()
        process_block(rows, sampling, prompt=PROMPT, output=list(prefix), paths=[()], stop_ids=sampling.stop_token_ids)
        return _cut(rows, sampling)[0]

    return law


def verified_target(sampling: SamplingParams, drafts: tuple[int, ...]) -> torch.Tensor:
    """[n+1, V]: the laws of one block's rows, processed together as the sampler does."""
    rows = torch.stack([logits_after(drafts[:i]) for i in range(len(drafts) + 1)])
    paths = [list(drafts[:i]) for i in range(len(drafts) + 1)]
    process_block(rows, sampling, prompt=PROMPT, output=[], paths=paths, stop_ids=sampling.stop_token_ids)
    return _cut(rows, sampling)


def _cut(rows: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    count = len(rows)
    return target_law(
        rows,
        temperature=torch.full((count,), sampling.temperature),
        top_k=torch.full((count,), sampling.top_k),
        top_p=torch.full((count,), sampling.top_p),
        min_p=torch.full((count,), sampling.min_p),
    )


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("rule", [STANDARD, BLOCK], ids=["standard", "block"])
@pytest.mark.parametrize("is_certain", [False, True], ids=["sampled draft", "certain draft"])
def test_rules_emit_the_processed_law(rule: Rule, parameters: str, is_certain: bool) -> None:
    sampling = SamplingParams(**PARAMETERS[parameters])
    target = plain_target(sampling)
    draft = random_model(VOCAB, seed=22, zeros=0.2)
    draft = cache(one_hot_model(draft) if is_certain else draft)
    for num_drafts in (1, 2):
        stream = stream_law(rule, target, draft, vocab=VOCAB, num_drafts=num_drafts)
        assert distance(stream, target, vocab=VOCAB, length=num_drafts + 1) < EXACT


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_a_block_of_rows_is_processed_as_single_rows_are(parameters: str) -> None:
    sampling = SamplingParams(**PARAMETERS[parameters])
    target = plain_target(sampling)
    for drafts in ((0, 0, 0), (2, 3, 3), (1, 0, 1), (3, 3, 2)):
        laws = verified_target(sampling, drafts)
        for i in range(len(drafts) + 1):
            assert torch.allclose(laws[i], target(drafts[:i]), atol=EXACT, rtol=0), f"row {i} after {drafts[:i]}"


def test_three_drafts_with_everything_on() -> None:
    sampling = SamplingParams(temperature=0.9, top_k=3, top_p=0.95, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.4)
    target, draft = plain_target(sampling), cache(random_model(VOCAB, seed=23))
    for rule in (STANDARD, BLOCK):
        assert distance(stream_law(rule, target, draft, vocab=VOCAB, num_drafts=3), target, vocab=VOCAB, length=4) < EXACT
