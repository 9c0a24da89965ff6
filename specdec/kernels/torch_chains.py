"""Plain torch for the rules that flip coins over chains: what CPUs serve with. Semantics: reference.py; mathematics: rules.py.

Owns: the order of work that keeps the vocabulary out of it: one log-sum-exp over all draft rows, scalars for the coins, and one
V-sized residual per request. Must not know: trees or lossless proofs. Read next: verified.py.
Letters: R requests, K drafts at most, L logits rows, V vocabulary, S support of a draft law.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specdec.kernels.philox import PURPOSE_ACCEPT, PURPOSE_RESIDUAL, uniform
from specdec.kernels.verified import INVALID_TOKEN, Verified

Decision = tuple[int, float]  # drafts kept, and the weight of p in the residual


@dataclass(frozen=True, slots=True)
class Chain:
    """One request: `drafts` tested ids, p and q [n] of each draft, accept coins [n], its first logits row."""

    request: int
    start: int
    drafts: list[int]
    p: list[float]
    q: list[float]
    coins: list[float]


class _Laws:
    """Draft laws of a batch: rows are looked at only where a residual needs them."""

    def __init__(
        self, draft_token_ids: torch.Tensor, logits: torch.Tensor | None, ids: torch.Tensor | None, one_hot: torch.Tensor | None
    ) -> None:
        self.ids = ids
        self.logits = None if logits is None else logits.float()
        self.certain = [logits is None] * len(draft_token_ids) if one_hot is None or logits is None else one_hot.tolist()
        if self.logits is None:
            self.q = torch.ones(draft_token_ids.shape)
            return
        if ids is not None and ids.dim() == 3:
            self.logits = self.logits.masked_fill(ids < 0, -torch.inf)
        self.log_total = torch.logsumexp(self.logits, dim=-1)  # [R, K]
        self.q = torch.where(torch.tensor(self.certain)[:, None], 1.0, (self._drawn(draft_token_ids) - self.log_total).exp())

    def _drawn(self, draft_token_ids: torch.Tensor) -> torch.Tensor:
        """[R, K] logit of each draft in its own row; -inf where the law cannot draw it."""
        if self.ids is None:
            return self.logits.gather(2, draft_token_ids.clamp_min(0)[..., None]).squeeze(-1)
        return self.logits.masked_fill(self.ids != draft_token_ids[..., None], -torch.inf).amax(-1)

    def subtract(self, mass: torch.Tensor, request: int, i: int, draft: int) -> torch.Tensor:
        """(mass - q_i)+ over the vocabulary; mass [V] is consumed."""
        if self.certain[request]:
            mass[draft] = 0.0
            return mass
        q = (self.logits[request, i] - self.log_total[request, i]).exp()
        if self.ids is None:
            return mass.sub_(q).clamp_min_(0.0)
        row = self.ids if self.ids.dim() == 1 else self.ids[request, i]
        mass.index_add_(0, row[row >= 0], -q[row >= 0])
        return mass.clamp_min_(0.0)


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
    """As reference.rejection_sample."""
    laws = _Laws(draft_token_ids, draft_logits, draft_ids, one_hot)

    def decide(chain: Chain) -> Decision:
        return _leading(_native(chain)), 1.0

    return _verify(decide, target_probs, draft_token_ids, cu_num_logits, laws=laws, seed=seed, position=position)


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
    """As reference.block_verify. h_i never exceeds w_i, so a coin above w_i says no without a sum over the vocabulary."""
    laws = _Laws(draft_token_ids, draft_logits, draft_ids, one_hot)

    def decide(chain: Chain) -> Decision:
        weights = [1.0]
        for p, q in zip(chain.p, chain.q, strict=True):
            weights.append(min(1.0, weights[-1] * p / q) if q > 0 else 0.0)
        for i in range(len(chain.drafts), 0, -1):
            w, coin = weights[i], chain.coins[i - 1]
            if coin < w and (i == len(chain.drafts) or coin < _stop_chance(target_probs, laws, chain, i, w)):
                return i, w
        return 0, 1.0

    return _verify(decide, target_probs, draft_token_ids, cu_num_logits, laws=laws, seed=seed, position=position)


def _stop_chance(target_probs: torch.Tensor, laws: _Laws, chain: Chain, i: int, w: float) -> float:
    """h_i = S_i / (S_i + 1 - w_i) with S_i = sum (w_i p - q)+ after i drafts."""
    rest = laws.subtract(target_probs[chain.start + i].float() * w, chain.request, i, chain.drafts[i])
    mass = float(rest.sum(dtype=torch.float64))
    return mass / (mass + 1.0 - w) if mass + 1.0 - w > 0 else 1.0


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
    """As reference.fly. The entropy of a row is taken only where a draft was refused with room for the window."""
    laws = _Laws(draft_token_ids, draft_logits, draft_ids, one_hot)
    gates = target_probs if gate_probs is None else gate_probs

    def may_hold(chain: Chain, i: int) -> bool:
        gate = gates[chain.start + i]
        top = gate.topk(min(entropy_top_k, len(gate))).values.double()
        return float(gate[chain.drafts[i]]) > 0.0 and float(torch.special.entr(top).sum()) >= entropy_threshold

    def decide(chain: Chain) -> Decision:
        kept, held = 0, None
        for i, says_yes in enumerate(_native(chain)):
            if says_yes and (held is None or i - held == window):
                kept, held = i + 1, None
            elif not says_yes:
                if held is not None or i + window >= len(chain.drafts) or not may_hold(chain, i):
                    break
                held = i
        return kept, 1.0

    return _verify(decide, target_probs, draft_token_ids, cu_num_logits, laws=laws, seed=seed, position=position)


def typical(
    target_probs: torch.Tensor, draft_token_ids: torch.Tensor, *, cu_num_logits: torch.Tensor, epsilon: float = 0.09, delta: float = 0.3
) -> Verified:
    """As reference.typical."""
    num_rows = target_probs.shape[0]
    entropy = torch.special.entr(target_probs).sum(-1, dtype=torch.float64) if num_rows else target_probs.new_zeros(0)
    bars = (delta * torch.exp(-entropy)).clamp_max(epsilon).tolist()
    best_mass, best = target_probs.max(-1) if num_rows else (entropy, entropy)
    masses, tokens = best_mass.tolist(), best.tolist()
    laws = _Laws(draft_token_ids, None, None, None)
    rows = []
    nothing = torch.zeros(len(draft_token_ids), dtype=torch.int64)
    for chain, num_nodes, num_invalid in _chains(target_probs, draft_token_ids, cu_num_logits, laws=laws, seed=nothing, position=nothing):
        if num_nodes < 0:
            rows.append(([], 0, 0))
            continue
        kept = _leading([p >= bars[chain.start + i] for i, p in enumerate(chain.p)])
        last = chain.start + kept
        rows.append(([*chain.drafts[:kept], tokens[last]] if masses[last] > 0 else [], num_nodes, num_invalid))
    return _pack(rows, draft_token_ids.shape[1])


def _native(chain: Chain) -> list[bool]:
    return [q > 0 and coin * q < p for p, q, coin in zip(chain.p, chain.q, chain.coins, strict=True)]


def _leading(pattern: list[bool]) -> int:
    return pattern.index(False) if False in pattern else len(pattern)


def _verify(
    decide: Callable[[Chain], Decision],
    target_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    *,
    laws: _Laws,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> Verified:
    """Decide each request by scalars, then draw its last token from one residual row."""
    chains = _chains(target_probs, draft_token_ids, cu_num_logits, laws=laws, seed=seed, position=position)
    decisions = [decide(chain) if num_nodes >= 0 else (0, 1.0) for chain, num_nodes, _ in chains]
    kept = torch.tensor([count for count, _ in decisions], dtype=torch.int64)
    last_coins = uniform(seed, position, purpose=PURPOSE_RESIDUAL, index=kept).tolist()
    rows = []
    for (chain, num_nodes, num_invalid), (count, weight), u in zip(chains, decisions, last_coins, strict=True):
        token = _recover(target_probs, laws, chain, count, weight, u) if num_nodes >= 0 else INVALID_TOKEN
        rows.append(([*chain.drafts[:count], token] if token >= 0 else [], max(num_nodes, 0), num_invalid))
    return _pack(rows, draft_token_ids.shape[1])


def _recover(target_probs: torch.Tensor, laws: _Laws, chain: Chain, kept: int, weight: float, u: float) -> int:
    p = target_probs[chain.start + kept]
    if kept < len(chain.drafts):
        token = _draw(laws.subtract(p.float() * weight, chain.request, kept, chain.drafts[kept]), u)
        if token >= 0:
            return token
    return _draw(p, u)


def _draw(mass: torch.Tensor, u: float) -> int:
    """Smallest id whose cumulative mass exceeds u times the total; -1 without mass."""
    cumulative = mass.cumsum(0, dtype=torch.float64)
    total = float(cumulative[-1])
    if not total > 0.0:
        return INVALID_TOKEN
    return int(torch.searchsorted(cumulative, u * total, right=True))


def _chains(
    target_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    *,
    laws: _Laws,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> list[tuple[Chain, int, int]]:
    """(chain of valid drafts, draft rows or -1 without logits rows, refused drafts) of each request."""
    bounds, drafts = cu_num_logits.tolist(), draft_token_ids.tolist()
    num_requests, width = draft_token_ids.shape
    index = torch.arange(width).expand(num_requests, width)
    coins = uniform(
        seed[:, None].expand(num_requests, width).contiguous(),
        position[:, None].expand(num_requests, width).contiguous(),
        purpose=PURPOSE_ACCEPT,
        index=index.contiguous(),
    ).tolist()
    rows = (cu_num_logits[:-1, None].long() + index).clamp_max(max(target_probs.shape[0] - 1, 0))
    p = (
        target_probs[rows, draft_token_ids.clamp_min(0)].tolist()
        if rows.numel() and target_probs.numel()
        else [[0.0] * width] * num_requests
    )
    q = laws.q.tolist()
    found = []
    for request in range(num_requests):
        num_nodes = bounds[request + 1] - bounds[request] - 1
        mine = drafts[request][: max(num_nodes, 0)]
        count = mine.index(INVALID_TOKEN) if INVALID_TOKEN in mine else len(mine)
        chain = Chain(request, bounds[request], mine[:count], p[request][:count], q[request][:count], coins[request][:count])
        found.append((chain, num_nodes, mine.count(INVALID_TOKEN)))
    return found


def _pack(rows: list[tuple[list[int], int, int]], width: int) -> Verified:
    """rows: (tokens, draft rows, refused drafts) of each request; no tokens is a request that emits nothing."""
    pad = width + 1
    tokens = torch.tensor([row + [INVALID_TOKEN] * (pad - len(row)) for row, _, _ in rows], dtype=torch.int64).view(-1, pad)
    path = torch.where(tokens >= 0, torch.arange(pad), INVALID_TOKEN)
    counts = [(len(row), nodes - max(len(row) - 1, 0), nodes - refused, refused) for row, nodes, refused in rows]
    return Verified(tokens, path, *torch.tensor(counts, dtype=torch.int64).view(-1, 4).unbind(1))
