"""The CPU column of exact-match verification: few rows, so lists beat tensors.

Semantics: kernels/reference.py, verify_coupled. Letters: R requests, L logits rows, K draft nodes, D depth.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from specdec.kernels.verified import INVALID_TOKEN, Verified


def verify_coupled(
    target_token_ids: torch.Tensor,
    draft_token_ids: torch.Tensor,
    *,
    cu_num_logits: torch.Tensor,
    parents: torch.Tensor | None = None,
    max_depth: int | None = None,
) -> Verified:
    """Keep the drafts that equal the target's own samples. Arguments and result as in the reference."""
    targets, bounds = target_token_ids.tolist(), cu_num_logits.tolist()
    drafts = draft_token_ids.tolist()
    trees = None if parents is None else parents.tolist()
    width = draft_token_ids.shape[1] if max_depth is None else max_depth
    emitted, paths, counts = [], [], []
    for request, (start, end) in enumerate(pairwise(bounds)):
        rows, nodes = targets[start:end], drafts[request][: max(end - start - 1, 0)]
        tokens, path = _follow_chain(rows, nodes) if trees is None else _follow_tree(rows, nodes, trees[request])
        if INVALID_TOKEN in tokens:
            tokens, path = [], []
        emitted.append(tokens + [INVALID_TOKEN] * (width + 1 - len(tokens)))
        paths.append(path + [INVALID_TOKEN] * (width + 1 - len(path)))
        invalid = nodes.count(INVALID_TOKEN)
        counts.append((len(tokens), end - start - len(tokens) if tokens else max(end - start - 1, 0), len(nodes) - invalid, invalid))
    sampled, rejected, tested, refused = torch.tensor(counts, dtype=torch.int64).view(-1, 4).unbind(1)
    return Verified(_matrix(emitted, width), _matrix(paths, width), sampled, rejected, tested, refused)


def _matrix(rows: list[list[int]], width: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), width + 1)


def _follow_chain(targets: list[int], drafts: list[int]) -> tuple[list[int], list[int]]:
    if not targets:
        return [], []
    kept = 0
    while kept < len(drafts) and drafts[kept] == targets[kept] and drafts[kept] >= 0:
        kept += 1
    return targets[: kept + 1], list(range(kept + 1))


def _follow_tree(targets: list[int], drafts: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
    if not targets:
        return [], []
    node, tokens, path = -1, [targets[0]], [0]
    while True:
        wanted = targets[node + 1]
        child = next((i for i, draft in enumerate(drafts) if parents[i] == node and draft == wanted and draft >= 0), None)
        if child is None:
            return tokens, path
        node = child
        tokens.append(targets[child + 1])
        path.append(child + 1)
