"""Rows of a compiled draft pass: which of a step's rows became text, where their KV goes, and who drafts behind them.

Owns: the arithmetic of proposers/kept_rows.py, paged.py and chain.wanted_drafts for the whole batch at once, over plain arrays;
those are its oracle. Must not know: any model.
Letters: R requests of the batch, M persistent rows, N committed rows, S spans (requests that have some), P chains (requests that draft).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit


class ChainRows(NamedTuple):
    """One pass, all int64.

    kept [N]: query row of each committed position; successors [N]: the token behind it; positions, slots [N]. spans [S]: request
    of each run of rows, starts [S + 1]: its first row, seq_lens [S]: positions it sees. chains [P]: requests that draft,
    newest [P]: their last rows, anchors [P]: the position behind it, wanted [P]: how many drafts.
    """

    kept: np.ndarray
    successors: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    spans: np.ndarray
    starts: np.ndarray
    seq_lens: np.ndarray
    chains: np.ndarray
    newest: np.ndarray
    anchors: np.ndarray
    wanted: np.ndarray


@njit(cache=True, nogil=True)
def chain_rows(
    cu_query_lens: np.ndarray,
    num_rejected: np.ndarray,
    num_sampled: np.ndarray,
    path: np.ndarray,
    rows: np.ndarray,
    token_ids: np.ndarray,
    num_computed: np.ndarray,
    block_table: np.ndarray,
    max_nodes: np.ndarray,
    block_size: int,
    max_len: int,
) -> ChainRows:
    """Lay out a step as StepView (proposers/base.py) describes it. max_nodes [R]; max_len: positions that drafts may reach."""
    num_requests = len(rows)
    num_rows = np.int64(cu_query_lens[num_requests]) - num_rejected.sum()
    kept, successors, positions, slots = np.empty((4, num_rows), np.int64)
    spans, seq_lens, chains, newest, anchors, wanted = np.empty((6, num_requests), np.int64)
    starts = np.zeros(num_requests + 1, np.int64)
    n = num_spans = num_chains = 0
    for r in range(num_requests):
        count = cu_query_lens[r + 1] - cu_query_lens[r] - num_rejected[r]
        computed, before = num_computed[r], count - num_sampled[r]  # rows ahead of the anchor's
        for place in range(count):
            position = computed - count + place
            offset = place if place < before else before + path[r, min(place - before, path.shape[1] - 1)]
            kept[n], positions[n] = cu_query_lens[r] + offset, position
            successors[n] = token_ids[rows[r], position + 1]
            slots[n] = np.int64(block_table[r, position // block_size]) * block_size + position % block_size
            n += 1
        if count > 0:
            spans[num_spans], seq_lens[num_spans] = r, computed
            num_spans += 1
            starts[num_spans] = n
        most = min(max_nodes[r], max_len - computed - 1)
        if num_sampled[r] > 0 and most > 0:
            chains[num_chains], newest[num_chains], anchors[num_chains], wanted[num_chains] = r, n - 1, computed, most
            num_chains += 1
    return ChainRows(
        kept, successors, positions, slots, spans[:num_spans], starts[: num_spans + 1], seq_lens[:num_spans],
        chains[:num_chains], newest[:num_chains], anchors[:num_chains], wanted[:num_chains],
    )  # fmt: skip
