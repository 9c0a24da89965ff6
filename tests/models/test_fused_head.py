"""The compiled EAGLE-3 head: near the plain float32 reference, and the same bits however its rows are batched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.kernels.cpu.team import has_amx
from specdec.models.attention import AttentionMetadata, allocate_kv
from specdec.models.draft_head import HeadStates
from specdec.models.eagle3 import Eagle3Model
from tests.models.eagle_reference import Reference, Spec, random_weights, write_head
from tests.models.test_eagle import Target, load

pytestmark = pytest.mark.skipif(not has_amx(), reason="no AMX bf16 tiles: the fused path is NOT tested here")

WIDE = Spec(width=192, target_width=192, mlp=96, num_heads=6, num_kv_heads=2, head_dim=64, draft_vocab=48, has_tables=True)
SPECS = {
    "eagle3": WIDE,
    "eagle3_1": replace(WIDE, fc_norm=True, norm_output=True),
    "residual": replace(WIDE, norm_before_residual=True, num_layers=2),
    "qk_norm": replace(WIDE, has_qk_norm=True),
    "bias": replace(WIDE, has_bias=True),
}
ROWS = 40


def run(head: Eagle3Model, ids: torch.Tensor, features: torch.Tensor, *, chunks: list[int]) -> HeadStates:
    """Feed one text in chunks."""
    kv = allocate_kv(head.num_layers, (4, 16, *head.kv_shape()), dtype=torch.bfloat16, device=torch.device("cpu"))
    table, parts, start = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32), [], 0
    for count in chunks:
        positions = torch.arange(start, start + count)
        meta = AttentionMetadata(
            cu_query_lens=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([start + count], dtype=torch.int32),
            block_table=table,
            slot_mapping=table[0][positions // 16].long() * 16 + positions % 16,
            query_lens_cpu=(count,),
            seq_lens_cpu=(start + count,),
        )
        parts.append(head.forward(ids[positions], features[positions], positions, kv, meta))
        start += count
    return HeadStates(torch.cat([part.scored for part in parts]), torch.cat([part.fed_back for part in parts]))


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, 97, (ROWS,), generator=generator), torch.randn(ROWS, 192, generator=generator).bfloat16()


def loaded(path: Path, spec: Spec) -> tuple[Eagle3Model, Reference]:
    weights = {name: tensor.bfloat16().float() for name, tensor in random_weights(spec).items()}
    head = load(write_head(path, spec, weights), spec, dtype=torch.bfloat16)
    assert isinstance(head, Eagle3Model)
    target = Target(width=192)
    return head, Reference(spec, weights, target.embedding, target.lm_head)


@pytest.mark.parametrize("name", SPECS)
def test_the_fused_head_is_the_reference_up_to_bfloat16(tmp_path: Path, inputs: tuple[torch.Tensor, torch.Tensor], name: str) -> None:
    head, reference = loaded(tmp_path / "head", SPECS[name])
    assert head.fused is not None
    got = run(head, *inputs, chunks=[17, 1, 4, 18])
    scored, following = reference.rows(inputs[0], inputs[1].float())
    for mine, want in ((got.scored, scored), (got.fed_back, following)):
        assert float((mine.float() - want).norm() / want.norm()) < 0.02
    head.fused = None
    eager = run(head, *inputs, chunks=[17, 1, 4, 18])
    assert float((got.scored.float() - eager.scored.float()).norm() / eager.scored.float().norm()) < 0.02


def test_a_row_has_the_same_bits_in_any_chunk(tmp_path: Path, inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    head, _ = loaded(tmp_path / "head", SPECS["eagle3_1"])
    one, other = (run(head, *inputs, chunks=chunks) for chunks in ([ROWS], [16, 1, 1, 5, 17]))
    assert torch.equal(one.scored, other.scored)
    assert torch.equal(one.fed_back, other.fed_back)
