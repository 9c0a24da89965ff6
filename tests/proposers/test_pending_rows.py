"""Rows that wait reach the head later, all of them, in order, once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from specdec.kernels.cpu.chain_rows import ChainRows
from specdec.proposers.pending_rows import MOST_ROWS, PendingRows

Seen = list[tuple[int, int, int, int, float]]  # persistent row, position, successor, slot, state


def step(lengths: dict[int, int], persistent: list[int], counts: list[int], drafting: list[int]) -> tuple[ChainRows, list[torch.Tensor]]:
    """A step that commits counts[i] rows of request i behind what it has; states say which row and position they are of."""
    kept, positions, states, spans, starts, seq_lens = [], [], [], [], [0], []
    query = 0
    for request, count in enumerate(counts):
        row = persistent[request]
        for _ in range(count):
            kept.append(query)
            positions.append(lengths[row])
            states.append(row * 1000.0 + lengths[row])
            lengths[row] += 1
            query += 1
        states.append(-1.0)  # a rejected row, which nobody keeps
        query += 1
        if count:
            spans.append(request)
            starts.append(len(kept))
            seq_lens.append(lengths[row])
    at = {request: stop - 1 for request, stop in zip(spans, starts[1:], strict=True)}
    chains = [request for request in drafting if request in at]
    arrays = (
        kept, [p + 7 for p in positions], positions, [p * 3 for p in positions], spans, starts, seq_lens,
        chains, [at[request] for request in chains], [lengths[persistent[request]] for request in chains], [2] * len(chains),
    )  # fmt: skip
    taps = [torch.tensor(states)[:, None].float(), torch.tensor(states)[:, None].float() + 0.5]
    return ChainRows(*(np.array(array, dtype=np.int64) for array in arrays)), taps


def read(rows: ChainRows, taps: list[torch.Tensor], persistent: list[int], seen: Seen) -> None:
    """What a head would be fed."""
    for place, request in enumerate(rows.spans.tolist()):
        first, stop = int(rows.starts[place]), int(rows.starts[place + 1])
        assert rows.seq_lens[place] == rows.positions[stop - 1] + 1
        for n in range(first, stop):
            state = float(taps[0][rows.kept[n], 0])
            assert float(taps[1][rows.kept[n], 0]) == state + 0.5
            seen.append((persistent[request], int(rows.positions[n]), int(rows.successors[n]), int(rows.slots[n]), state))
    last = {request: int(rows.starts[place + 1]) - 1 for place, request in enumerate(rows.spans.tolist())}
    assert rows.newest.tolist() == [last[request] for request in rows.chains.tolist()]


@pytest.mark.parametrize("seed", range(20))
def test_all_rows_arrive_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    pending, lengths = PendingRows(), dict.fromkeys(range(5), 0)
    seen: Seen = []
    waited = 0
    for _ in range(60):
        persistent = rng.sample(range(5), rng.randint(1, 5))
        drafting = [i for i in range(len(persistent)) if rng.random() < 0.1]
        rows, taps = step(lengths, persistent, [rng.randint(0, 3) for _ in persistent], drafting)
        if pending.may_wait(rows):
            pending.put_off(persistent, rows, taps)
            waited += 1
        else:
            read(*pending.join(persistent, rows, taps), persistent, seen)
    persistent = list(range(5))
    rows, taps = step(lengths, persistent, [1] * 5, [0])
    read(*pending.join(persistent, rows, taps), persistent, seen)
    assert waited > 5
    assert pending.num_rows == 0
    assert len(seen) == sum(lengths.values())
    for row in range(5):
        mine = [entry for entry in seen if entry[0] == row]
        assert mine == [(row, p, p + 7, p * 3, row * 1000.0 + p) for p in range(lengths[row])]


def test_rows_wait_only_while_nobody_drafts_and_room_is_left() -> None:
    pending, lengths = PendingRows(), dict.fromkeys(range(16), 0)
    persistent = list(range(16))
    assert not pending.may_wait(step(lengths, persistent, [1] * 16, [3])[0])
    assert not pending.may_wait(step(lengths, persistent, [40] + [0] * 15, [])[0])  # a prompt
    for _ in range(MOST_ROWS // 16):
        rows, taps = step(lengths, persistent, [1] * 16, [])
        assert pending.may_wait(rows)
        pending.put_off(persistent, rows, taps)
    assert not pending.may_wait(step(lengths, persistent, [1] * 16, [])[0])
    pending.forget(range(15))
    assert pending.num_rows == MOST_ROWS // 16
    pending.forget([15, 3])
    assert pending.num_rows == 0
