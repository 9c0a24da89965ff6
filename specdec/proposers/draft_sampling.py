"""How drafts are drawn from draft logits, and the law that is kept beside them for verification.

Owns: argmax, sampled and coupled draws, their noise, and the laws of a step's chains. Must not know: which model made the logits.
Letters: N rows of a pass (one per drafting request), R requests of the batch, K drafts, Vd draft vocabulary.

greedy: the argmax, a certain draft. probabilistic: a draw from the draft's own law with noise keyed by (seed, anchor, index), since
verification by block looks at drafts that it throws away; the law is kept. coupled: the inverse CDF of the draft's law at the very
uniform that the target will use at that position, so that similar laws give equal tokens; verified by exact match as a certain draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from specdec.kernels.dispatch import kernel
from specdec.kernels.philox import PURPOSE_DRAFT, PURPOSE_TARGET
from specdec.proposers.base import Dense, DraftBatch, DraftLaw, DraftSampling

DraftSampleMethod = Literal["greedy", "probabilistic", "coupled"]


class DrawnDrafts(NamedTuple):
    """ids [N] int64, -1 where nothing may be drawn. logits [N, Vd] f32: log of the law they were drawn from, None for certain drafts."""

    ids: torch.Tensor
    logits: torch.Tensor | None


def draw_drafts(
    logits: torch.Tensor,
    sampling: DraftSampling,
    *,
    requests: torch.Tensor,
    anchors: torch.Tensor,
    index: int,
    method: DraftSampleMethod,
    paths: Mapping[int, Sequence[int]] | None = None,
) -> DrawnDrafts:
    """Draw draft `index` (0 for the one after the anchor) of each row of logits [N, Vd].

    requests [N] int64: place of each row in the batch and so in `sampling`. anchors [N] int64: position of the token that the
    chain follows. Temperature, top-k and top-p are the request's. paths: by place in the batch, the drafts before this one; what the
    grammar forbids behind them is never drawn.
    """
    logits = _allowed(logits.float(), sampling, requests=requests, index=index, paths=paths)
    device, seed = logits.device, sampling.seed[requests]
    cuts = {
        "temperature": sampling.temperature[requests],
        "top_k": sampling.top_k[requests],
        "top_p": sampling.top_p[requests],
        "min_p": torch.zeros_like(sampling.top_p[requests]),
    }
    if method == "probabilistic":
        law = kernel("target_law", device)(logits, **cuts)
        u = kernel("uniform", device)(seed, anchors, purpose=PURPOSE_DRAFT, index=index)
        return DrawnDrafts(kernel("sample", device)(law, u), law.float().log())
    if method == "greedy":
        u = cuts["temperature"] = torch.zeros_like(cuts["temperature"])  # an argmax reads no noise
    else:
        u = kernel("uniform", device)(seed, anchors + index, purpose=PURPOSE_TARGET)
    return DrawnDrafts(kernel("sample_logits", device)(logits, u, **cuts), None)


def _allowed(
    logits: torch.Tensor, sampling: DraftSampling, *, requests: torch.Tensor, index: int, paths: Mapping[int, Sequence[int]] | None
) -> torch.Tensor:
    mask = sampling.token_mask(index, paths) if sampling.token_mask is not None else None
    if mask is None:
        return logits
    known = min(mask.shape[1], logits.shape[1])  # ids past the target's vocabulary are never allowed
    allowed = torch.zeros_like(logits, dtype=torch.bool)
    allowed[:, :known] = mask[requests, :known]
    return logits.masked_fill(~allowed, -torch.inf)


class ChainDraws:
    """The chains of one step while they grow, by batch index. anchors: position of the token that each drafting request's chain follows.

    least_trust: a chain ends before the chance of all its drafts together, by the draft's own law, falls below it; only for
    greedy drafts, since the length of a chain may not depend on what was drawn.
    """

    def __init__(self, sampling: DraftSampling, anchors: Mapping[int, int], *, method: DraftSampleMethod, least_trust: float = 0.0) -> None:
        self.sampling, self.anchors, self.method, self._least_trust = sampling, anchors, method, least_trust
        self._trust = dict.fromkeys(anchors, 1.0) if least_trust else {}
        self.tokens: dict[int, list[int]] = {request: [] for request in anchors}
        self._laws: dict[int, list[torch.Tensor]] = {request: [] for request in anchors}

    def draw(self, requests: Sequence[int], logits: torch.Tensor) -> None:
        """Append the next draft of each request; logits [len(requests), Vd]. All chains have the same length before."""
        device = logits.device
        drawn = draw_drafts(
            logits,
            self.sampling,
            requests=torch.tensor(requests, dtype=torch.int64, device=device),
            anchors=torch.tensor([self.anchors[request] for request in requests], dtype=torch.int64, device=device),
            index=len(self.tokens[requests[0]]) if requests else 0,
            method=self.method,
            paths={request: chain for request, chain in self.tokens.items() if -1 not in chain},
        )
        trusted = self._trusted(requests, logits, drawn.ids) if self._least_trust else [True] * len(requests)
        for row, (request, token) in enumerate(zip(requests, drawn.ids.tolist(), strict=True)):
            if trusted[row]:
                self.tokens[request].append(token)
            if drawn.logits is not None:
                self._laws[request].append(drawn.logits[row])

    def going_on(self, requests: Iterable[int], wanted: Mapping[int, int]) -> list[int]:
        """Return those of `requests` whose chains want further drafts and have not ended."""
        return [x for x in requests if wanted[x] > len(self.tokens[x]) and self._trust.get(x, 1.0) >= self._least_trust]

    def _trusted(self, requests: Sequence[int], logits: torch.Tensor, ids: torch.Tensor) -> list[bool]:
        chances = logits.float().softmax(dim=-1).gather(1, ids.clamp(min=0)[:, None])[:, 0].tolist()
        for request, chance in zip(requests, chances, strict=True):
            self._trust[request] *= chance
        return [self._trust[request] >= self._least_trust for request in requests]

    def newest(self, requests: Sequence[int]) -> list[int]:
        """Return each request's newest draft as an id that a model can be fed: 0 in place of a draft that could not be drawn."""
        return [max(self.tokens[request][-1], 0) for request in requests]

    def batch(self, num_requests: int, *, source: str, id_map: torch.Tensor | None = None) -> DraftBatch:
        """Return the step's drafts with their laws. id_map [Vd] int64: target id of each draft id; None where they are equal."""
        width = max((len(chain) for chain in self.tokens.values()), default=0)
        token_ids = torch.full((num_requests, width), -1, dtype=torch.int64)
        for request, chain in self.tokens.items():
            token_ids[request, : len(chain)] = torch.tensor(chain, dtype=torch.int64)
        if id_map is not None:
            token_ids = torch.where(token_ids >= 0, id_map.cpu()[token_ids.clamp(min=0)], -1)
        device = self.sampling.seed.device
        return DraftBatch(
            token_ids=token_ids.to(device),
            num_nodes=torch.tensor([len(self.tokens.get(request, ())) for request in range(num_requests)]),
            source=[source if self.tokens.get(request) else "" for request in range(num_requests)],
            law=self._law(num_requests, width, id_map),
        )

    def _law(self, num_requests: int, width: int, id_map: torch.Tensor | None) -> DraftLaw | None:
        rows = [row for chain in self._laws.values() for row in chain]
        if not rows:
            return None
        logits = rows[0].new_zeros(num_requests, width, len(rows[0]))
        one_hot = self.sampling.temperature <= 0  # an argmax was drawn with certainty
        for request, chain in self._laws.items():
            for i, row in enumerate(chain):
                logits[request, i] = row
        return DraftLaw(one_hot=one_hot, rows=Dense(logits, id_map))
