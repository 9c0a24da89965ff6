"""Sampling in plain torch, for CPUs where nothing compiled can run: a row's processed law and its inverse-CDF draw.

Semantics: kernels/reference.py, target_law and sample_logits. Read next: sampling.py, which prefers the compiled rows.
Letters: L logits rows, V vocabulary.
"""

from __future__ import annotations

import torch

GREEDY_TEMPERATURE = 1e-5
HEAD = 256  # candidates looked at before a whole row is sorted; nuclei are rarely larger


def target_probs(
    logits: torch.Tensor, *, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return the law [L, V] float32 of plain sampling, greedy rows one-hot. A cut that no row asks for costs nothing."""
    greedy = temperature < GREEDY_TEMPERATURE
    scaled = torch.nan_to_num(logits, nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf) / torch.where(greedy, 1.0, temperature)[:, None]
    if bool((top_k > 0).any()):
        _cut_top_k(scaled, top_k)
    probs = scaled.softmax(-1).nan_to_num_(0.0)  # a row without a finite logit has no mass
    if bool((min_p > 0).any()):
        probs = torch.where(probs >= min_p[:, None] * probs.amax(-1, keepdim=True), probs, 0.0)
        probs /= probs.sum(-1, keepdim=True)
    if bool((top_p < 1).any()):
        probs = torch.where(probs >= _top_p_threshold(probs, top_p)[:, None], probs, 0.0)
        probs /= probs.sum(-1, keepdim=True)
    probs = probs.nan_to_num_(0.0)
    if bool(greedy.any()):
        probs[greedy] = _one_hot(logits[greedy])
    return probs


def draw(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return the inverse CDF of probs [L, V] at u [L], in id order; -1 for a row without mass."""
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, (u[:, None] * total), right=True).squeeze(-1)
    ids = torch.where(ids < probs.shape[1], ids, _last_positive(probs))
    return torch.where(total.squeeze(-1) > 0, ids, -1)


def sample_logits(
    logits: torch.Tensor, u: torch.Tensor, *, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Draw one id per row of logits [L, V]; greedy rows take the lowest id of the largest logit, -1 where none is finite."""
    greedy = temperature < GREEDY_TEMPERATURE
    if bool(greedy.all()):
        return argmax(logits)
    return draw(target_probs(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p), u)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Lowest id of the largest finite logit of each row, -1 where there is none."""
    top, ids = logits.max(-1)
    if bool(torch.isfinite(top).all()):
        return ids
    clean = torch.nan_to_num(logits, nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    top, ids = clean.max(-1)
    return torch.where(top > -torch.inf, ids, -1)


def _one_hot(logits: torch.Tensor) -> torch.Tensor:
    ids = argmax(logits)
    return torch.zeros_like(logits).scatter_(1, ids.clamp(min=0)[:, None], (ids >= 0).to(logits.dtype)[:, None])


def _cut_top_k(scaled: torch.Tensor, top_k: torch.Tensor) -> None:
    """Put -inf below the k-th largest value of each row that asks for it; ties at the border stay."""
    vocab = scaled.shape[1]
    asked = ((top_k > 0) & (top_k < vocab)).nonzero().squeeze(-1)
    if len(asked) == 0:
        return
    rows = scaled[asked]
    depth = top_k[asked]
    border = rows.topk(int(depth.max()), dim=-1).values.gather(1, depth[:, None] - 1)
    scaled[asked] = torch.where(rows >= border, rows, -torch.inf)


def _top_p_threshold(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[L]: the largest t such that the mass of {p >= t} reaches top_p; 0 where everything stays."""
    width = min(HEAD, probs.shape[1])
    threshold = torch.zeros_like(top_p)
    head = probs.topk(width, dim=-1).values
    mass = head.cumsum(-1)
    reached = mass[:, -1] >= top_p
    first = torch.searchsorted(mass, top_p[:, None]).squeeze(-1).clamp(max=width - 1)
    threshold = torch.where(reached, head.gather(1, first[:, None]).squeeze(-1), threshold)
    for row in ((~reached) & (top_p < 1)).nonzero().squeeze(-1).tolist():
        ordered = probs[row].sort(descending=True).values
        index = int(torch.searchsorted(ordered.cumsum(0), top_p[row]))
        threshold[row] = ordered[min(index, len(ordered) - 1)]
    return torch.where(top_p < 1, threshold, 0.0)


def _last_positive(probs: torch.Tensor) -> torch.Tensor:
    """Highest id with mass in each row: where rounding lets u reach the end of the CDF."""
    return probs.shape[1] - 1 - (probs.flip(-1) > 0).to(torch.uint8).argmax(-1)
