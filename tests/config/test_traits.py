"""What each draft method reserves: slots, lookahead, taps. The numbers are vLLM's, so a wrong one is a crash or a hole in a cache."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.config.methods import FINAL_NORM, DraftKV, traits_for
from specdec.config.speculative import METHODS, build
from specdec.errors import ConfigError

K = 5
HEAD = {"model": "org/head", "num_speculative_tokens": K}
HIDDEN = {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [7, 3]}}}

# name, config, draft checkpoint, (draft slots, KV lookahead, prefill lookahead)
GOLDEN: list[tuple[str, dict[str, Any], dict[str, Any], tuple[int, int, int]]] = [
    ("eagle", {"method": "eagle", **HEAD}, {}, (0, K, 1)),
    ("eagle3", {"method": "eagle3", **HEAD}, {}, (0, K, 1)),
    ("p-eagle", {"method": "eagle3", "parallel_drafting": True, **HEAD}, {}, (K - 1, K, 1)),
    ("mtp, one module", {"method": "mtp", "num_speculative_tokens": K}, {"num_nextn_predict_layers": 1}, (0, K, 1)),
    ("mtp, modules not counted", {"method": "mtp", "num_speculative_tokens": K}, {"mtp_num_hidden_layers": 3}, (0, K, 1)),
    ("mtp, modules", {"method": "mtp", "num_speculative_tokens": K}, {"num_nextn_predict_layers": 3}, (0, K, K)),
    ("mtp, modules, one draft", {"method": "mtp", "num_speculative_tokens": 1}, {"num_nextn_predict_layers": 3}, (0, 1, 1)),
    ("dflash", {"method": "dflash", **HEAD}, {}, (0, K + 1, 1)),
    ("dspark from the anchor", {"method": "dspark", **HEAD}, {"sample_from_anchor": True}, (0, K, 1)),
    ("dspark, native default", {"method": "dspark", **HEAD}, {}, (0, K, 1)),
    ("dspark with a bonus row", {"method": "dspark", **HEAD}, {"sample_from_anchor": False}, (0, K + 1, 1)),
    ("dspark, speculators default", {"method": "dspark", **HEAD}, {"speculators_model_type": "dspark"}, (0, K + 1, 1)),
    ("draft_model", {"method": "draft_model", **HEAD}, {}, (1, K, 0)),
    ("pard", {"method": "draft_model", "parallel_drafting": True, **HEAD}, {}, (K, K, 0)),
    ("ngram", {"method": "ngram", "num_speculative_tokens": K}, {}, (0, 0, 0)),
    ("ngram_gpu", {"method": "ngram_gpu", "num_speculative_tokens": K}, {}, (0, 0, 0)),
    ("suffix", {"method": "suffix"}, {}, (0, 0, 0)),
    ("custom_class", {"method": "custom_class", "model": "pkg.mod.Class", "num_speculative_tokens": K}, {}, (0, 0, 0)),
    ("extract_hidden_states", {"method": "extract_hidden_states", **HIDDEN}, {}, (0, 0, 0)),
    # methods of our own, and those that vLLM dropped
    ("medusa", {"method": "medusa", **HEAD}, {}, (0, 0, 0)),
    ("mlp_speculator", {"method": "mlp_speculator", **HEAD}, {}, (0, 0, 0)),
    ("early_exit", {"method": "early_exit", "num_speculative_tokens": K, "exit_layer": 4}, {}, (0, K, 0)),
]


@pytest.mark.parametrize(("config", "draft", "expected"), [row[1:] for row in GOLDEN], ids=[row[0] for row in GOLDEN])
def test_slots_and_lookahead(config: dict[str, Any], draft: dict[str, Any], expected: tuple[int, int, int]) -> None:
    traits = traits_for(build(config), draft, num_target_layers=32)
    assert (traits.draft_slots, traits.lookahead, traits.prefill_lookahead) == expected
    assert traits.method == config["method"]


def test_the_golden_table_covers_every_method() -> None:
    assert {row[1]["method"] for row in GOLDEN} | {"hybrid"} == set(METHODS)


@pytest.mark.parametrize(
    ("draft", "taps"),
    [
        ({}, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [9, 1, 5]}, (1, 5, 9)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, (1, 2)),
        ({"target_layer_ids": [1, 14]}, (2, 15)),
        ({"dflash_config": {"target_layer_ids": [0, 8]}}, (1, 9)),
        ({"eagle_aux_hidden_state_layer_ids": [4], "target_layer_ids": [20]}, (4,)),
        ({"eagle_config": {"use_aux_hidden_state": False}}, (FINAL_NORM,)),
    ],
)
def test_eagle3_reads_the_layers_its_checkpoint_names(draft: dict[str, Any], taps: tuple[Any, ...]) -> None:
    assert traits_for(build({"method": "eagle3", **HEAD}), draft, num_target_layers=32).taps == taps


def test_layer_lists_of_block_drafters_count_from_zero() -> None:
    dflash = traits_for(build({"method": "dflash", **HEAD}), {"dflash_config": {"target_layer_ids": [1, 30]}}, num_target_layers=32)
    assert dflash.taps == (2, 31)
    in_target = {"model_type": "deepseek_v41", "dspark_target_layer_ids": [3, 4]}
    assert traits_for(build({"method": "dspark", **HEAD}), in_target, num_target_layers=32).taps == (3, 4)


def test_short_targets_do_not_tap_a_layer_twice() -> None:
    assert traits_for(build({"method": "eagle3", **HEAD}), {}, num_target_layers=5).taps == (2,)


def test_taps_outside_the_target_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers \[40\].*32 layers"):
        traits_for(build({"method": "eagle3", **HEAD}), {"eagle_aux_hidden_state_layer_ids": [40]}, num_target_layers=32)


def test_unknown_depth_and_missing_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="names no hidden states"):
        traits_for(build({"method": "eagle3", **HEAD}), {})
    with pytest.raises(ConfigError, match="num_speculative_tokens is missing"):
        traits_for(build({"method": "eagle", "model": "org/head"}), {})


def test_heads_read_the_final_state_and_adapters_their_exit() -> None:
    for method in ("eagle", "medusa", "mlp_speculator"):
        assert traits_for(build({"method": method, **HEAD})).taps == (FINAL_NORM,)
    adapter = {"method": "early_exit", "exit_layer": 4, **HEAD}
    assert traits_for(build(adapter), num_target_layers=8).taps == (4,)
    assert traits_for(build(adapter | {"model": None}), num_target_layers=8).taps == ()
    assert traits_for(build(adapter)).kv is DraftKV.TARGET


def test_hidden_states_are_tapped_where_the_user_says() -> None:
    assert traits_for(build({"method": "extract_hidden_states", **HIDDEN})).taps == (3, 7)


@pytest.mark.parametrize(
    ("draw", "extra", "law"),
    [
        ("greedy", {}, "one_hot"),
        ("coupled", {}, "one_hot"),
        ("probabilistic", {}, "dense"),
        ("probabilistic", {"dspark_draft_topk": 4}, "sparse"),
    ],
)
def test_the_law_follows_how_drafts_are_drawn(draw: str, extra: dict[str, Any], law: str) -> None:
    config = build({"method": "dspark", "draft_sample_method": draw, **HEAD, **extra})
    assert traits_for(config, {"target_layer_ids": [1]}).laws == law


def test_a_hybrid_reserves_the_most_of_its_sources() -> None:
    sources = [{"method": "ngram", "num_speculative_tokens": 8}, {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3}]
    traits = traits_for(build({"method": "hybrid", "sources": sources}), {"eagle3": {"target_layer_ids": [1, 6]}}, num_target_layers=8)
    assert (traits.max_nodes, traits.max_depth, traits.lookahead, traits.prefill_lookahead, traits.draft_slots) == (8, 8, 3, 1, 0)
    assert traits.taps == (2, 7)
    assert traits.kv is DraftKV.OWN
    capped = build({"method": "hybrid", "num_speculative_tokens": 2, "sources": sources})
    assert traits_for(capped, None, num_target_layers=8).max_nodes == 2


def test_a_hybrid_that_samples_has_dense_laws_from_the_source_that_draws() -> None:
    sources = [{"method": "suffix"}, {"method": "eagle", "model": "org/head", "num_speculative_tokens": 3}]
    config = build({"method": "hybrid", "draft_sample_method": "probabilistic", "sources": sources})
    assert traits_for(config).laws == "dense"
    lookups = [{"method": "suffix"}, {"method": "ngram", "num_speculative_tokens": 3}]
    with pytest.raises(ConfigError, match=r"none of .* has draft logits"):
        build({"method": "hybrid", "draft_sample_method": "probabilistic", "sources": lookups})
