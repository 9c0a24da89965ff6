"""PendingRows: committed rows that a draft head has not read yet, because nobody drafted behind them.

Owns: their states of the target, and joining them with a later step's rows. Must not know: what the head computes.

A pass over 16 rows costs a head hardly more than one over a single row, so while no request drafts, rows wait and are read together.
Until then the draft KV of the newest tokens is missing; a prefix shared in that time costs its next reader some acceptance, and never
a token.
Letters: N rows, R requests of a step, Ht target width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from specdec.kernels.cpu.chain_rows import ChainRows

MOST_ROWS = 256  # of all requests together: 0.9 MB of three states of 576
MOST_OF_A_STEP = 16  # rows of a request: more are a prompt's, which fill a pass by themselves


class _Part(NamedTuple):
    """Rows of one request and step. states: by tap, each [n, Ht]; the others [n]."""

    states: list[torch.Tensor]
    successors: np.ndarray
    positions: np.ndarray
    slots: np.ndarray


class PendingRows:
    """By persistent row, in order of position."""

    def __init__(self) -> None:
        self._parts: dict[int, list[_Part]] = {}
        self.num_rows = 0

    def forget(self, rows: Sequence[int]) -> None:
        """The rows belong to somebody else now."""
        for row in rows:
            for part in self._parts.pop(row, ()):
                self.num_rows -= len(part.positions)

    def may_wait(self, rows: ChainRows) -> bool:
        """Whether a step's rows can be put off: nobody drafts, and no prompt is among them."""
        return not len(rows.chains) and self.num_rows + len(rows.kept) <= MOST_ROWS and len(rows.kept) <= MOST_OF_A_STEP * len(rows.spans)

    def put_off(self, persistent: Sequence[int], rows: ChainRows, taps: Sequence[torch.Tensor]) -> None:
        """Keep a step's rows. persistent [R]: the requests' rows; taps: the target's states of all query rows."""
        kept = torch.from_numpy(rows.kept)
        states = [tap[kept] for tap in taps]
        for place, request in enumerate(rows.spans.tolist()):
            part = slice(int(rows.starts[place]), int(rows.starts[place + 1]))
            self._parts.setdefault(persistent[request], []).append(
                _Part([state[part] for state in states], rows.successors[part], rows.positions[part], rows.slots[part])
            )
        self.num_rows += len(rows.kept)

    def join(self, persistent: Sequence[int], rows: ChainRows, taps: Sequence[torch.Tensor]) -> tuple[ChainRows, list[torch.Tensor]]:
        """Return a step's rows with those that waited before them, and their states, which `kept` now points into."""
        if not self.num_rows:
            return rows, list(taps)
        self.put_off(persistent, rows, taps)
        requests = [request for request in range(len(persistent)) if persistent[request] in self._parts]
        runs = [self._parts[persistent[request]] for request in requests]
        parts = [part for run in runs for part in run]
        counts = [sum(len(part.positions) for part in run) for run in runs]
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.array(counts, dtype=np.int64))))
        last = {request: int(stop) - 1 for request, stop in zip(requests, starts[1:], strict=True)}
        joined = rows._replace(
            kept=np.arange(starts[-1]),
            successors=np.concatenate([part.successors for part in parts]),
            positions=np.concatenate([part.positions for part in parts]),
            slots=np.concatenate([part.slots for part in parts]),
            spans=np.array(requests, dtype=np.int64),
            starts=starts,
            seq_lens=np.array([run[-1].positions[-1] + 1 for run in runs], dtype=np.int64),
            newest=np.array([last[request] for request in rows.chains.tolist()], dtype=np.int64),
        )
        states = [torch.cat([part.states[tap] for part in parts]) for tap in range(len(taps))]
        self.forget([persistent[request] for request in requests])
        return joined, states
