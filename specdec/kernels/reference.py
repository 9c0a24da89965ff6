"""What every sampling and verification kernel means, written for the reader: float64 inside, loops over requests.

Owns: the only copy of these semantics; the other columns are tested against it. Must not know: devices or speed.
Read next: rules.py, then reference_layers.py and reference_state.py, then rejection_sample.py (the Triton form).
Letters: R requests, K drafts at most, L logits rows, V vocabulary, S support of a draft law, n drafts of one request.

Rows. Request r owns logits rows cu_num_logits[r] .. cu_num_logits[r+1]-1: its anchor's, then one per draft. Row i of a chain is the
law of the token after draft i; the last row scores the bonus token. A request without rows samples nothing.

The rules themselves (which coin, how many drafts, which residual) are in rules.py; here their coins are flipped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from specdec.kernels.philox import PURPOSE_ACCEPT, PURPOSE_RESIDUAL, PURPOSE_SYNTHETIC, uniform
from specdec.kernels.rules import BLOCK, STANDARD, Problem, Rule, fly_rule, typical_rule
from specdec.kernels.verified import INVALID_TOKEN, Verified

GREEDY_TEMPERATURE = 1e-5  # below this the row is argmax by branch, never by division


# ---------------------------------------------------------------- the target's law and its samples


def target_law(
    logits: torch.Tensor, *, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return the law [L, V] (float64) that plain sampling draws from: temperature, top-k, min-p, top-p, each renormalised.

    Args:
        logits: [L, V] floating, penalties and masks already applied. NaN and +inf count as -inf.
        temperature: [L] f32; below 1e-5 the row is one-hot at its argmax, the lowest id on ties.
        top_k: [L] int64; 0 or -1 is off. Keeps logits >= the k-th largest, so ties at the border stay.
        min_p: [L] f32; keeps p >= min_p * max p.
        top_p: [L] f32; keeps p >= t for the largest t whose kept mass reaches top_p, so ties at the border stay.

    A row without a finite logit is all zero.
    """
    law = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    for row in range(logits.shape[0]):
        wide = _finite_or_minus_inf(logits[row].double())
        if bool(wide.isneginf().all()):
            continue
        if float(temperature[row]) < GREEDY_TEMPERATURE:
            law[row, wide.argmax()] = 1.0
            continue
        wide = _keep_top_k(wide, int(top_k[row]))
        probs = torch.softmax(wide / float(temperature[row]), dim=-1)
        probs = _normalised(torch.where(probs >= float(min_p[row]) * probs.max(), probs, 0.0))
        law[row] = _keep_top_p(probs, float(top_p[row]))
    return law


def sample(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return the inverse CDF of probs [L, V] at u [L] in id order: the smallest id whose cumulative mass exceeds u * total.

    Mass need not sum to 1. An id of probability 0 is never returned; a row without mass gives INVALID_TOKEN. [L] int64.
    """
    ids = torch.full((probs.shape[0],), INVALID_TOKEN, dtype=torch.int64, device=probs.device)
    for row in range(probs.shape[0]):
        ids[row] = _inverse_cdf(probs[row].double(), float(u[row]))
    return ids


def sample_logits(
    logits: torch.Tensor,
    u: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Return sample(target_law(logits, ...), u) as [L] int64; the other columns never write the law down."""
    return sample(target_law(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p), u)


def _finite_or_minus_inf(logits: torch.Tensor) -> torch.Tensor:
    return torch.where(logits.isnan() | logits.isposinf(), -torch.inf, logits)


def _keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    if k <= 0 or k >= logits.numel():
        return logits
    kth_largest = logits.sort(descending=True).values[k - 1]
    return torch.where(logits >= kth_largest, logits, -torch.inf)


def _keep_top_p(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    if top_p >= 1.0:
        return probs
    descending = probs.sort(descending=True).values
    reached = (descending.cumsum(0) >= top_p).nonzero()
    threshold = descending[reached[0, 0]] if len(reached) else 0.0
    return _normalised(torch.where(probs >= threshold, probs, 0.0))


def _normalised(mass: torch.Tensor) -> torch.Tensor:
    return mass / mass.sum()


def _inverse_cdf(mass: torch.Tensor, u: float) -> int:
    cumulative = mass.cumsum(0)
    above = (cumulative > u * cumulative[-1]).nonzero()
    return int(above[0, 0]) if len(above) else INVALID_TOKEN


# ---------------------------------------------------------------- exact match: follow the target's own samples


def verify_coupled(
    target_token_ids: torch.Tensor,
    draft_token_ids: torch.Tensor,
    *,
    cu_num_logits: torch.Tensor,
    parents: torch.Tensor | None = None,
    max_depth: int | None = None,
) -> Verified:
    """Keep drafts while they equal the target's own sample; emit that sample at the first mismatch.

    The emitted tokens are the plain sampler's tokens, whatever was drafted, so this is lossless for chains and trees.

    Args:
        target_token_ids: [L] int64, the target's sample at every row, drawn with noise keyed by (seed, position).
        draft_token_ids: [R, K] int64; INVALID_TOKEN is refused.
        parents: [R, K] int64, index of each draft's parent draft, -1 for a child of the anchor; None for chains.
        max_depth: the width of the result less one, at least the depth of the deepest draft; K when None.
    """
    width = draft_token_ids.shape[1] if max_depth is None else max_depth
    rows = []
    for request, start, num_drafts in _requests(cu_num_logits):
        drafts = draft_token_ids[request, : max(num_drafts, 0)].tolist()
        above = list(range(-1, num_drafts - 1)) if parents is None else parents[request, : max(num_drafts, 0)].tolist()
        rows.append(_walk(target_token_ids[start : start + num_drafts + 1].tolist(), drafts, above))
    return _pack(rows, width, draft_token_ids.device)


def _walk(targets: list[int], drafts: list[int], parents: list[int]) -> _Row:
    """Follow, from the anchor, the child whose token is the target's sample; the lowest index among equal siblings."""
    if not targets:
        return _Row([], [], 0, 0)
    node, tokens, path = -1, [], [0]
    while True:
        wanted = targets[node + 1]
        tokens.append(wanted)
        children = [child for child, parent in enumerate(parents) if parent == node and drafts[child] == wanted != INVALID_TOKEN]
        if not children:
            return _Row(tokens, path, len(drafts), drafts.count(INVALID_TOKEN))
        node = children[0]
        path.append(node + 1)


# ---------------------------------------------------------------- the kernels of these rules


def rejection_sample(
    target_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    *,
    cu_num_logits: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    draft_ids: torch.Tensor | None = None,
    one_hot: torch.Tensor | None = None,
) -> Verified:
    """Verify chains of drafts by p/q so that every emitted token follows the target's law.

    Args:
        target_probs: [L, V] floating, the law of plain sampling at every row (`target_law`).
        draft_token_ids: [R, K] int64. INVALID_TOKEN ends a chain: nothing was proposed there, so the target is sampled.
        cu_num_logits: [R+1] int32. seed: [R] int64. position: [R] int64, the anchor's position: coins are keyed by
            (seed, accept, position, i) and the last token by (seed, residual, position, kept), never by position alone.
        draft_logits: [R, K, S] floating; softmax over S is the law each draft was truly drawn from. None: all one-hot.
        draft_ids: what the S entries stand for: None for the vocabulary itself (S = V), [S] int64 for a map shared by all
            rows, or [R, K, S] int64 with -1 as padding. Ids of one row are distinct.
        one_hot: [R] bool, requests whose drafts were proposed with certainty; their draft_logits are not read.

    Source: Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1.
    """
    laws = _DraftLaws(draft_logits, draft_ids, one_hot)
    return _verify(STANDARD, target_probs, draft_token_ids, cu_num_logits, seed=seed, position=position, laws=laws)


def block_verify(
    target_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    *,
    cu_num_logits: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    draft_ids: torch.Tensor | None = None,
    one_hot: torch.Tensor | None = None,
) -> Verified:
    """Verify the whole chain jointly: the same law as `rejection_sample`, and never fewer tokens on average.

    Arguments as in `rejection_sample`. All coins count, also those after a refused draft, which is why keying them by
    position alone would bias the next step. Source: Sun et al. 2024, arXiv:2403.10444.
    """
    laws = _DraftLaws(draft_logits, draft_ids, one_hot)
    return _verify(BLOCK, target_probs, draft_token_ids, cu_num_logits, seed=seed, position=position, laws=laws)


def fly(
    target_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    *,
    cu_num_logits: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    gate_probs: torch.Tensor | None = None,
    draft_logits: torch.Tensor | None = None,
    draft_ids: torch.Tensor | None = None,
    one_hot: torch.Tensor | None = None,
    window: int = 6,
    entropy_threshold: float = 0.3,
    entropy_top_k: int = 3,
) -> Verified:
    """Lossy. As `rejection_sample`, but hold a refused draft where the target is undecided, and keep it if the next
    `window` drafts are all accepted after it.

    Args:
        gate_probs: [L, V], the law whose entropy gates; None for target_probs. Greedy requests pass their law at
            temperature 1 here, since a one-hot law has no entropy.
        entropy_threshold: nats, over the entropy_top_k most likely ids, not renormalised.
    """
    gates = target_probs if gate_probs is None else gate_probs
    laws = _DraftLaws(draft_logits, draft_ids, one_hot)

    def rule_at(start: int, num_rows: int) -> Rule:
        gate = gates[start : start + num_rows].double()
        return fly_rule(gate, window=window, entropy_threshold=entropy_threshold, entropy_top_k=entropy_top_k)

    return _verify(rule_at, target_probs, draft_token_ids, cu_num_logits, seed=seed, position=position, laws=laws)


def typical(
    target_probs: torch.Tensor, draft_token_ids: torch.Tensor, *, cu_num_logits: torch.Tensor, epsilon: float = 0.09, delta: float = 0.3
) -> Verified:
    """Lossy. Keep drafts that are typical of the target, p(d) >= min(epsilon, delta * exp(-H(p))), then the argmax."""
    nothing = torch.zeros(draft_token_ids.shape[0], dtype=torch.int64)  # every coin is 0 or 1 and every law one-hot
    rule = typical_rule(epsilon=epsilon, delta=delta)
    laws = _DraftLaws(None, None, None)
    return _verify(rule, target_probs, draft_token_ids, cu_num_logits, seed=nothing, position=nothing, laws=laws)


def synthetic(
    target_token_ids: torch.Tensor,
    draft_token_ids: torch.Tensor,
    *,
    cu_num_logits: torch.Tensor,
    rates: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> Verified:
    """Lossy, for benchmarks. Keep draft i with probability rates[i] ([K] f32, given that i-1 was kept), then the target's
    sample at that row. target_token_ids [L] as in `verify_coupled`; coins are keyed as in `rejection_sample`.
    """
    rows = []
    for request, start, num_drafts in _requests(cu_num_logits):
        targets = target_token_ids[start : start + num_drafts + 1].tolist()
        drafts = draft_token_ids[request, : max(num_drafts, 0)].tolist()
        valid = drafts[: drafts.index(INVALID_TOKEN)] if INVALID_TOKEN in drafts else drafts
        coins = _flips(seed[request], position[request], PURPOSE_SYNTHETIC, len(valid))
        kept = _leading_below(coins, rates.tolist())
        failed = not targets or INVALID_TOKEN in targets[: kept + 1]
        tokens = [] if failed else [*valid[:kept], targets[kept]]
        rows.append(_Row(tokens, list(range(len(tokens))), len(drafts), drafts.count(INVALID_TOKEN)))
    return _pack(rows, draft_token_ids.shape[1], draft_token_ids.device)


class _DraftLaws(NamedTuple):
    logits: torch.Tensor | None
    ids: torch.Tensor | None
    one_hot: torch.Tensor | None

    def rows(self, request: int, drafts: list[int], vocab: int) -> torch.Tensor:
        """Return q [n, V] float64 of one request's drafts."""
        q = torch.zeros(len(drafts), vocab, dtype=torch.float64)
        for i, draft in enumerate(drafts):
            if self.logits is None or (self.one_hot is not None and bool(self.one_hot[request])):
                q[i, draft] = 1.0
                continue
            logits, ids = self.logits[request, i].double().cpu(), self._support(request, i)
            q[i].index_add_(0, ids[ids >= 0], torch.softmax(logits[ids >= 0], dim=-1))
        return q

    def _support(self, request: int, i: int) -> torch.Tensor:
        if self.ids is None:
            return torch.arange(self.logits.shape[-1])  # type: ignore[union-attr]
        return (self.ids if self.ids.dim() == 1 else self.ids[request, i]).cpu()


def _verify(
    rule: Rule | Callable[[int, int], Rule],
    target_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    *,
    seed: torch.Tensor,
    position: torch.Tensor,
    laws: _DraftLaws,
) -> Verified:
    rows = []
    for request, start, num_drafts in _requests(cu_num_logits):
        if num_drafts < 0:
            rows.append(_Row([], [], 0, 0))
            continue
        drafts = draft_token_ids[request, :num_drafts].tolist()
        valid = drafts[: drafts.index(INVALID_TOKEN)] if INVALID_TOKEN in drafts else drafts
        p = target_probs[start : start + len(valid) + 1].double().cpu()
        problem = Problem(p, laws.rows(request, valid, p.shape[1]), valid)
        its_rule = rule if isinstance(rule, Rule) else rule(start, num_drafts + 1)
        tokens = _emit(its_rule, problem, seed[request], position[request])
        rows.append(_Row(tokens, list(range(len(tokens))), num_drafts, drafts.count(INVALID_TOKEN)))
    return _pack(rows, draft_token_ids.shape[1], draft_token_ids.device)


def _emit(rule: Rule, problem: Problem, seed: torch.Tensor, position: torch.Tensor) -> list[int]:
    """Return kept drafts and the token after them; nothing when the row after the kept drafts has no mass."""
    flips = _flips(seed, position, PURPOSE_ACCEPT, len(problem.drafts))
    pattern = [u < coin for u, coin in zip(flips, rule.coins(problem), strict=True)]
    kept = rule.length(problem, pattern)
    if not bool(problem.p[kept].sum() > 0):
        return []
    u = uniform(seed.reshape(1), position.reshape(1), purpose=PURPOSE_RESIDUAL, index=kept)
    return [*problem.drafts[:kept], _inverse_cdf(rule.recovered(problem, kept), float(u))]


def _flips(seed: torch.Tensor, position: torch.Tensor, purpose: int, count: int) -> list[float]:
    name = partial(uniform, purpose=purpose, index=torch.arange(count))
    return name(seed.cpu().reshape(1).repeat(count), position.cpu().reshape(1).repeat(count)).tolist()


def _leading_below(values: list[float], bars: list[float]) -> int:
    return next((i for i, value in enumerate(values) if not value < bars[i]), len(values))


class _Row(NamedTuple):
    tokens: list[int]
    path: list[int]
    num_nodes: int
    num_invalid: int


def _requests(cu_num_logits: torch.Tensor) -> list[tuple[int, int, int]]:
    """(request, first logits row, number of drafts) of each request; -1 drafts for a request without rows."""
    bounds = cu_num_logits.tolist()
    return [(request, start, end - start - 1) for request, (start, end) in enumerate(pairwise(bounds))]


def _pack(rows: list[_Row], width: int, device: torch.device) -> Verified:
    failed = [INVALID_TOKEN in row.tokens or not row.tokens for row in rows]
    tokens = torch.full((len(rows), width + 1), INVALID_TOKEN, dtype=torch.int64)
    path = tokens.clone()
    for index, row in enumerate(rows):
        if not failed[index]:
            tokens[index, : len(row.tokens)] = torch.tensor(row.tokens)
            path[index, : len(row.path)] = torch.tensor(row.path)
    num_sampled = [0 if fail else len(row.tokens) for row, fail in zip(rows, failed, strict=True)]
    num_rejected = [row.num_nodes - max(num - 1, 0) for row, num in zip(rows, num_sampled, strict=True)]
    num_drafts = [row.num_nodes - row.num_invalid for row in rows]
    counts = (torch.tensor(c, dtype=torch.int64) for c in (num_sampled, num_rejected, num_drafts, [row.num_invalid for row in rows]))
    return Verified(*(tensor.to(device) for tensor in (tokens, path, *counts)))
