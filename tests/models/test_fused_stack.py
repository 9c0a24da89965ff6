"""The compiled decoder stack: as near float32 as bfloat16 allows, and the same bits however rows are batched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.kernels.cpu.team import has_amx
from specdec.models.registry import TargetModel, load_model
from tests.models.paged import PagedRun
from tests.models.tiny import oracle_logits, save_random, tiny_config

needs_amx = pytest.mark.skipif(not has_amx(), reason="no AMX bf16 tiles: the fused path is NOT tested here")
pytestmark = needs_amx

SIZES = {"vocab_size": 112, "hidden_size": 192, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 64}
FAMILIES = {
    "llama": ("llama", {"num_key_value_heads": 2}),
    "qwen2_bias": ("qwen2", {"num_key_value_heads": 3}),
    "qwen3_norms": ("qwen3", {"num_key_value_heads": 1}),
    "mistral_window": ("mistral", {"num_key_value_heads": 2, "sliding_window": 9}),
    "smollm3_nope": ("smollm3", {"num_key_value_heads": 2, "no_rope_layer_interval": 2}),
    "wide_heads": ("llama", {"num_key_value_heads": 2, "head_dim": 128}),
}
PROMPT = torch.randint(1, 112, (100,), generator=torch.Generator().manual_seed(3)).tolist()


def fused_model(name: str, path: Path) -> TargetModel:
    """Save a random model of the family, its products of unit size so that rounding does not blow up, and load it in bf16."""
    kind, changes = FAMILIES[name]
    random = save_random(tiny_config(kind, **{**SIZES, **changes}), path)
    for parameter in random.parameters():
        if parameter.ndim > 1:
            parameter.data *= parameter.shape[1] ** -0.5 / 0.3
    random.to(torch.bfloat16).float().save_pretrained(path)
    model = load_model(str(path), AutoConfig.from_pretrained(path), dtype=torch.bfloat16, device=torch.device("cpu"), max_model_len=128)
    assert model.fused is not None, "these sizes fit whole tiles"
    return model


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_in_float32_up_to_bfloat16(name: str, tmp_path: Path) -> None:
    model = fused_model(name, tmp_path)
    run = PagedRun(model, max_len=112, block_size=16)
    chunks = [PROMPT[:70], PROMPT[70:73], PROMPT[73:74], PROMPT[74:]]  # many tiles, a decode block, one row, two tiles
    got = torch.cat([run.feed({0: chunk})[0].clone() for chunk in chunks])
    want = oracle_logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), PROMPT)
    assert relative_error(got, want) < 0.03  # bf16 has 8 bits; three layers of products keep two digits


def test_a_row_has_the_same_bits_alone_in_a_chunk_and_beside_others(tmp_path: Path) -> None:
    """What makes speculation exact in bf16 too: verifying k drafts computes what k plain steps compute."""
    model = fused_model("llama", tmp_path)
    whole = PagedRun(model, max_len=112, block_size=16).feed({0: PROMPT})[0].clone()
    single = PagedRun(model, max_len=112, block_size=16)
    rows = [single.feed({0: PROMPT[:40]})[0].clone()] + [single.feed({0: [token]})[0].clone() for token in PROMPT[40:]]
    assert torch.equal(torch.cat(rows), whole)
    beside = PagedRun(model, num_requests=3, max_len=112, block_size=16)
    beside.feed({1: PROMPT[50:60], 2: PROMPT[3:40]})
    mixed = [beside.feed({1: [5], 0: PROMPT[:33], 2: [7, 8, 9]})[0].clone(), beside.feed({2: [1] * 20, 0: PROMPT[33:]})[0].clone()]
    assert torch.equal(torch.cat(mixed), whole)


def test_tree_rows_have_the_bits_of_their_branch(tmp_path: Path) -> None:
    model = fused_model("llama", tmp_path)
    run = PagedRun(model, max_len=112, block_size=16)
    run.feed({0: PROMPT[:20]})
    tree = [(-1, 11), (-1, 12), (0, 13), (1, 14), (3, 15)]  # branches 11 13 and 12 14 15
    got = run.peek_trees({0: [PROMPT[20]]}, {0: tree})[0].clone()
    for branch, nodes in (([11, 13], [1, 3]), ([12, 14, 15], [2, 4, 5])):
        chain = PagedRun(model, max_len=112, block_size=16)
        chain.feed({0: PROMPT[:20]})
        want = chain.feed({0: [PROMPT[20], *branch]})[0]
        assert relative_error(got[[0, *nodes]], want) < 0.01  # keys lie in other slots, so sums run in another order


def test_taps_are_the_residual_stream_of_the_eager_path(tmp_path: Path) -> None:
    model = fused_model("llama", tmp_path)
    run = PagedRun(model, max_len=112, block_size=16)
    run.feed({0: PROMPT[:30]}, taps=(0, 1, 3))
    fused = {tap: value.float().clone() for tap, value in run.taps.items()}
    model.fused = None
    run = PagedRun(model, max_len=112, block_size=16)
    run.feed({0: PROMPT[:30]}, taps=(0, 1, 3))
    for tap in (0, 1, 3):
        assert relative_error(fused[tap], run.taps[tap].float()) < 0.03


def test_blocks_that_do_not_hold_whole_tiles_go_through_the_eager_path(tmp_path: Path) -> None:
    model = fused_model("llama", tmp_path)
    small, large = PagedRun(model, max_len=112, block_size=4), PagedRun(model, max_len=112, block_size=16)
    assert relative_error(small.feed({0: PROMPT})[0], large.feed({0: PROMPT})[0].clone()) < 0.03
