"""The compiled drafting phase of an EAGLE-3 head: the drafts, states and draft KV of its passes made one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.kernels.cpu.team import has_amx, has_amx_int8
from specdec.models.attention import AttentionMetadata, KVPair, allocate_kv
from specdec.models.eagle3 import Eagle3Model
from tests.models.eagle_reference import random_weights, write_head
from tests.models.test_eagle import Target, load
from tests.models.test_fused_head import WIDE

pytestmark = pytest.mark.skipif(not has_amx(), reason="no AMX bf16 tiles: the compiled phase is NOT tested here")

SPECS = {
    "eagle3": WIDE,
    "own_states": replace(WIDE, fc_norm=True, norm_output=True),
    "together": replace(WIDE, norm_before_fc=True, norm_before_residual=True, num_layers=2),
    "borrowed": replace(WIDE, has_tables=False),
    "bias": replace(WIDE, has_bias=True, has_qk_norm=True),
}
LENGTHS, WANTED = (19, 37, 5), (4, 1, 3)  # three requests; the second drafts only once
TABLE = torch.tensor([[7, 2, 0, 3], [1, 9, 5, 4], [6, 8, 10, 11]], dtype=torch.int32)


def build(path: Path, name: str, **setting: str) -> Eagle3Model:
    spec = replace(SPECS[name], mlp=128)  # whole tiles of either type
    head = load(write_head(path, spec, random_weights(spec)), spec, dtype=torch.bfloat16, **setting)
    assert isinstance(head, Eagle3Model)
    target = Target(width=192)
    target.embedding = target.embedding.bfloat16()
    head.attach(target)  # type: ignore[arg-type]
    assert head.chain is not None
    return head


def empty(head: Eagle3Model) -> list[KVPair]:
    return allocate_kv(head.num_layers, (12, 16, *head.kv_shape()), dtype=torch.bfloat16, device=torch.device("cpu"))


def slots(request: int, positions: torch.Tensor) -> torch.Tensor:
    return TABLE[request][positions // 16].long() * 16 + positions % 16


def one_pass(head: Eagle3Model, kv: list[KVPair], request: int, ids: torch.Tensor, features: torch.Tensor, start: int):  # type: ignore[no-untyped-def]
    positions = torch.arange(start, start + len(ids))
    meta = AttentionMetadata(
        cu_query_lens=torch.tensor([0, len(ids)], dtype=torch.int32),
        seq_lens=torch.tensor([start + len(ids)], dtype=torch.int32),
        block_table=TABLE[request : request + 1],
        slot_mapping=slots(request, positions),
        query_lens_cpu=(len(ids),),
        seq_lens_cpu=(start + len(ids),),
    )
    return head.forward(ids, features, positions, kv, meta)


def by_passes(
    head: Eagle3Model, kv: list[KVPair], taps: list[torch.Tensor], ids: torch.Tensor, kept: list[torch.Tensor]
) -> list[tuple[list[int], list[float]]]:
    """Drafts and their chances, request by request and pass by pass."""
    found = []
    for request, (rows, wanted) in enumerate(zip(kept, WANTED, strict=True)):
        features = head.combine({tap: states[rows] for tap, states in zip(head.taps, taps, strict=True)})
        states = one_pass(head, kv, request, ids[rows], features, 0)
        drafts: list[int] = []
        chances: list[float] = []
        while True:
            law = head.compute_logits(states.scored[-1:]).softmax(dim=-1)[0]
            best = int(law.argmax())
            drafts.append(best if head.id_map is None else int(head.id_map[best]))
            chances.append(float(law[best]))
            if len(drafts) == wanted:
                break
            states = one_pass(head, kv, request, torch.tensor(drafts[-1:]), states.fed_back[-1:], len(rows) - 1 + len(drafts))
        found.append((drafts, chances))
    return found


@pytest.mark.parametrize("name", SPECS)
def test_the_phase_is_its_passes(tmp_path: Path, name: str) -> None:
    from specdec.kernels.cpu.chain_rows import ChainRows

    head = build(tmp_path / "head", name)
    assert head.chain is not None
    generator = torch.Generator().manual_seed(3)
    total = 80
    taps = [torch.randn(total, 192, generator=generator).bfloat16() for _ in head.taps]
    ids = torch.randint(0, 97, (total,), generator=generator)
    order = torch.randperm(total, generator=generator)  # committed rows lie anywhere among the step's rows
    kept = [part.sort().values for part in torch.split(order[: sum(LENGTHS)], list(LENGTHS))]
    want_kv, kv = empty(head), empty(head)
    want = by_passes(head, want_kv, taps, ids, kept)
    lengths = np.array(LENGTHS)
    starts = np.concatenate(([0], lengths.cumsum()))
    positions = [torch.arange(count) for count in LENGTHS]
    rows = ChainRows(
        kept=torch.cat(kept).numpy(),
        successors=ids[torch.cat(kept)].numpy(),
        positions=torch.cat(positions).numpy(),
        slots=torch.cat([slots(request, at) for request, at in enumerate(positions)]).numpy(),
        spans=np.arange(3),
        starts=starts,
        seq_lens=lengths,
        chains=np.arange(3),
        newest=starts[1:] - 1,
        anchors=lengths,
        wanted=np.array(WANTED),
    )
    grown = head.chain.run(taps, rows, TABLE.numpy(), kv, most=max(WANTED))
    for request, (drafts, chances) in enumerate(want):
        wanted = WANTED[request]
        assert grown.token_ids[request].tolist() == drafts + [-1] * (max(WANTED) - wanted)
        assert grown.confidence[request, :wanted] == pytest.approx(chances, rel=0.03)
    for mine, theirs in zip((cache for pair in kv for cache in pair), (cache for pair in want_kv for cache in pair), strict=True):
        assert torch.equal(mine == 0, theirs == 0)  # a chain that ended early wrote nothing more
        assert float((mine.float() - theirs.float()).norm() / theirs.float().norm()) < 0.02
    first = head.chain.run(taps, rows, TABLE.numpy(), kv, most=0)
    law = head.compute_logits(first.scored).softmax(dim=-1).max(dim=-1).values
    assert law.tolist() == pytest.approx([chances[0] for _, chances in want], rel=0.03)


@pytest.mark.skipif(not has_amx_int8(), reason="no AMX int8 tiles: rounded weights are NOT tested here")
@pytest.mark.parametrize("name", ["eagle3", "own_states", "together"])
def test_a_phase_with_rounded_weights_is_near_the_exact_one(tmp_path: Path, name: str) -> None:
    from specdec.kernels.cpu.chain_rows import ChainRows

    taps = [torch.randn(20, 192, generator=torch.Generator().manual_seed(5)).bfloat16() for _ in SPECS[name].taps]
    ids = torch.randint(0, 97, (20,), generator=torch.Generator().manual_seed(6)).numpy()
    positions = np.arange(20)
    rows = ChainRows(
        positions, ids, positions, slots(0, torch.arange(20)).numpy(), *map(np.array, ([0], [0, 20], [20], [0], [19], [20], [4]))
    )
    found = []
    for setting in ({}, {"quantization": "int8"}):
        head = build(tmp_path / str(len(found)), name, **setting)
        assert head.chain is not None
        first = head.chain.run(taps, rows, TABLE[:1].numpy(), empty(head), most=0).scored.float().clone()
        found.append((first, head.chain.run(taps, rows, TABLE[:1].numpy(), empty(head), most=4)))
    (exact, _), (rounded, grown) = found
    assert 0 < float((rounded - exact).norm() / exact.norm()) < 0.05
    assert (grown.token_ids >= 0).all()


def test_a_chain_ends_where_it_is_no_longer_likely(tmp_path: Path) -> None:
    from specdec.kernels.cpu.chain_rows import ChainRows

    head = build(tmp_path / "head", "eagle3")
    assert head.chain is not None
    taps = [torch.randn(8, 192, generator=torch.Generator().manual_seed(5)).bfloat16() for _ in head.taps]
    rows = ChainRows(*map(np.array, ([0], [4], [0], [112], [0], [0, 1], [1], [0], [0], [1], [6])))
    free = head.chain.run(taps, rows, TABLE.numpy(), empty(head), most=6)
    chances, tokens = free.confidence[0].copy(), free.token_ids[0].tolist()
    together = chances.cumprod()
    for cut in range(7):
        least = float(together[cut] * 1.001) if cut < 6 else 0.0
        grown = head.chain.run(taps, rows, TABLE.numpy(), empty(head), most=6, least_trust=least)
        assert grown.token_ids[0].tolist() == tokens[:cut] + [-1] * (6 - cut)


def test_states_that_are_no_numbers_draft_nothing(tmp_path: Path) -> None:
    from specdec.kernels.cpu.chain_rows import ChainRows

    head = build(tmp_path / "head", "eagle3")
    assert head.chain is not None
    taps = [torch.full((1, 192), torch.nan, dtype=torch.bfloat16) for _ in head.taps]
    rows = ChainRows(*map(np.array, ([0], [4], [0], [112], [0], [0, 1], [1], [0], [0], [1], [3])))
    assert head.chain.run(taps, rows, TABLE.numpy(), empty(head), most=3).token_ids.tolist() == [[-1, -1, -1]]


def test_rounded_weights_work_where_nothing_is_compiled(tmp_path: Path) -> None:
    spec = SPECS["own_states"]
    path = write_head(tmp_path / "head", spec, random_weights(spec))
    ids, features = torch.arange(9), torch.randn(9, 192, generator=torch.Generator().manual_seed(2))
    exact, rounded = (
        one_pass(load(path, spec, **setting), fresh_kv(spec.num_layers), 0, ids, features, 0) for setting in ({}, {"quantization": "int8"})
    )
    assert 0 < float((rounded.scored - exact.scored).norm() / exact.scored.norm()) < 0.05


def fresh_kv(num_layers: int) -> list[KVPair]:
    return allocate_kv(num_layers, (12, 16, 2, 64), dtype=torch.float32, device=torch.device("cpu"))
