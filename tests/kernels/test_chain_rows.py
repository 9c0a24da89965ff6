"""chain_rows: the whole batch's arithmetic at once equals the plain per-step functions, over random steps."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specdec.proposers.base import DraftRail, StepView
from specdec.proposers.chain import wanted_drafts
from specdec.proposers.compiled_chain import lay_out
from specdec.proposers.kept_rows import kept_rows
from specdec.proposers.paged import Span, paged_rows, step_lengths
from tests.proposers.views import view

pytest.importorskip("numba")
BLOCK_SIZE, MAX_LEN = 16, 90


def random_step(rng: random.Random) -> StepView:
    """Prompts being read, plain steps, chains and trees partly kept, and requests at the end of their room."""
    count = rng.randint(1, 6)
    query, rejected, sampled, computed, paths = [], [], [], [], []
    for _ in range(count):
        depth = rng.randint(0, 5)
        is_reading, accepted = rng.random() < 0.3, rng.randint(0, depth)
        query.append(rng.randint(1, 40) if is_reading else depth + 1 + rng.choice((0, 0, 9)))
        rejected.append(0 if is_reading else depth - accepted)
        sampled.append(0 if is_reading else accepted + 1)
        computed.append(query[-1] - rejected[-1] + rng.randint(0, 40))
        paths.append([0, *sorted(rng.sample(range(1, depth + 1), accepted)), *[0] * (5 - accepted)])
    tensor = torch.tensor
    return view(
        count,
        cu_query_lens=torch.tensor([0, *query], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        num_rejected=tensor(rejected),
        num_sampled=tensor(sampled),
        num_computed=tensor(computed),
        path=tensor(paths),
        rows=tensor(rng.sample(range(9), count)),
        token_ids=torch.randint(0, 97, (9, 128), generator=torch.Generator().manual_seed(rng.randint(0, 999)), dtype=torch.int32),
        block_table=torch.randperm(count * 8, generator=torch.Generator().manual_seed(1)).view(count, 8).int(),
        max_nodes=[rng.randint(0, 5) for _ in range(count)],
    )


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_those_of_the_plain_functions(seed: int) -> None:
    step = random_step(random.Random(seed))
    rows = lay_out(step, block_size=BLOCK_SIZE, max_len=MAX_LEN)
    lengths = step_lengths(step)
    spans = [Span(i, x.context, x.num_computed) for i, x in enumerate(lengths) if x.context < x.num_computed]
    metas: list[dict[str, Any]] = []
    rail = SimpleNamespace(block_size=BLOCK_SIZE, build_attention=lambda **meta: metas.append(meta))
    want = paged_rows(cast("DraftRail", rail), step, spans)
    assert rows.kept.tolist() == kept_rows(step).tolist()
    assert rows.positions.tolist() == want.positions.tolist()
    assert rows.slots.tolist() == metas[0]["slot_mapping"].tolist()
    assert rows.successors.tolist() == step.token_ids[step.rows[want.owner], want.positions + 1].tolist()
    assert rows.spans.tolist() == [span.request for span in spans]
    assert rows.seq_lens.tolist() == metas[0]["seq_lens"]
    assert [b - a for a, b in zip(rows.starts, rows.starts[1:], strict=False)] == metas[0]["query_lens"]
    drafting = wanted_drafts(step, [x.num_sampled for x in lengths], num_tokens=[x.num_computed + 1 for x in lengths], max_len=MAX_LEN)
    assert dict(zip(rows.chains.tolist(), rows.wanted.tolist(), strict=True)) == drafting
    assert rows.anchors.tolist() == [lengths[request].num_computed for request in drafting]
    last = dict(zip(rows.spans.tolist(), want.last.tolist(), strict=True))
    assert rows.newest.tolist() == [last[request] for request in drafting]


def test_nobody_drafts_and_nothing_is_kept() -> None:
    step = view(1, cu_query_lens=torch.tensor([0, 0], dtype=torch.int32), num_sampled=torch.tensor([0]), num_computed=torch.tensor([0]))
    rows = lay_out(step, block_size=BLOCK_SIZE, max_len=MAX_LEN)
    assert [len(array) for array in rows] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
