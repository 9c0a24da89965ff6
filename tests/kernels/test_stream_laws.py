"""Sampled laws of whole streams: many short generations with sampled drafts, several verify steps each, against the exact law.

G = 2 sum O ln(O/E) over all three-token streams. Seeds are fixed, so a run always gives the same number; each bar is set so that an
exact rule would exceed it with probability below 1e-6.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from specdec.kernels import torch_chains
from specdec.kernels.philox import PURPOSE_ACCEPT, PURPOSE_DRAFT, uniform
from specdec.kernels.torch_chains import block_verify, rejection_sample

VOCAB, NUM_DRAFTS, LENGTH = 3, 3, 3
BAR = 80.0  # 26 degrees of freedom: P(> 80) is about 2e-7
P = torch.tensor([0.7, 0.2, 0.1])
Q = torch.tensor([0.3, 0.3, 0.4])


def generate(rule: Any, *, count: int, draft_by_position: bool = False) -> torch.Tensor:
    """Return [count, LENGTH] tokens; every stream has its own seed and verifies chains until it is long enough."""
    seed = torch.arange(count)
    streams = torch.full((count, LENGTH + NUM_DRAFTS + 1), -1, dtype=torch.int64)
    lengths = torch.zeros(count, dtype=torch.int64)
    while bool((lengths < LENGTH).any()):
        active = (lengths < LENGTH).nonzero().flatten()
        at = lengths[active]
        drafts = torch.stack([draw_draft(seed[active], at, i, by_position=draft_by_position) for i in range(NUM_DRAFTS)], 1)
        verified = rule(
            P.repeat(len(active) * (NUM_DRAFTS + 1), 1),
            drafts,
            cu_num_logits=torch.arange(len(active) + 1, dtype=torch.int32) * (NUM_DRAFTS + 1),
            seed=seed[active],
            position=at,
            draft_logits=Q.log().expand(len(active), NUM_DRAFTS, VOCAB),
        )
        columns = at[:, None] + torch.arange(NUM_DRAFTS + 1)
        streams[active[:, None], columns] = verified.token_ids
        lengths[active] += verified.num_sampled
    return streams[:, :LENGTH]


def draw_draft(seed: torch.Tensor, anchor: torch.Tensor, i: int, *, by_position: bool) -> torch.Tensor:
    position, index = (anchor + i, 0) if by_position else (anchor, i)
    return torch.searchsorted(Q.cumsum(0), uniform(seed, position, purpose=PURPOSE_DRAFT, index=index)).clamp_max(VOCAB - 1)


def g_statistic(streams: torch.Tensor) -> float:
    weights = VOCAB ** torch.arange(LENGTH - 1, -1, -1)
    observed = torch.bincount((streams * weights).sum(1), minlength=VOCAB**LENGTH).double()
    expected = torch.tensor([float(P[list(tokens)].double().prod()) for tokens in product(range(VOCAB), repeat=LENGTH)]) * len(streams)
    return float(2 * torch.special.xlogy(observed, observed / expected).sum())


@pytest.mark.law
@pytest.mark.parametrize("rule", [rejection_sample, block_verify])
def test_streams_follow_the_target(rule: Any) -> None:
    assert g_statistic(generate(rule, count=8_000)) < BAR


@pytest.mark.law
def test_draft_noise_keyed_by_position_alone_biases_the_block_rule() -> None:
    assert g_statistic(generate(block_verify, count=8_000, draft_by_position=True)) > BAR


@pytest.mark.law
@pytest.mark.slow
def test_coins_keyed_by_position_alone_bias_the_block_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 100_000
    assert g_statistic(generate(block_verify, count=count)) < BAR

    def by_position(seed: torch.Tensor, position: torch.Tensor, *, purpose: int, index: Any = 0) -> torch.Tensor:
        if purpose == PURPOSE_ACCEPT:
            return uniform(seed, position + index, purpose=purpose)
        return uniform(seed, position, purpose=purpose, index=index)

    monkeypatch.setattr(torch_chains, "uniform", by_position)
    assert g_statistic(generate(block_verify, count=count)) > BAR
