"""Each check that vLLM makes on its speculative config refuses the same input here, naming field and way out."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.config import compatibility
from specdec.config.speculative import build
from specdec.errors import ConfigError

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
EAGLE = {"method": "eagle", "model": "org/head", "num_speculative_tokens": 4}
DRAFT = {"method": "draft_model", "model": "org/small", "num_speculative_tokens": 4}
DSPARK = {"method": "dspark", "model": "org/block", "num_speculative_tokens": 4}
HIDDEN = {"method": "extract_hidden_states", "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}}
SCHEDULE = "num_speculative_tokens_per_batch_size"

ROWS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("trap key", NGRAM | {"tensor_parallel_size": 2}, ("tensor_parallel_size", "not a key")),
    ("draft TP", EAGLE | {"draft_tensor_parallel_size": 2}, ("draft_tensor_parallel_size is 2", "must be 1")),
    ("k below 1", NGRAM | {"num_speculative_tokens": 0}, ("num_speculative_tokens is 0", "at least 1")),
    ("k missing", {"method": "ngram"}, ("num_speculative_tokens is missing",)),
    ("model missing", {"method": "eagle", "num_speculative_tokens": 3}, ("model is missing", "`eagle`")),
    ("class missing", {"method": "custom_class", "num_speculative_tokens": 3}, ("model is missing", "`custom_class`")),
    ("class path", {"method": "custom_class", "num_speculative_tokens": 3, "model": "Proposer"}, ("model is 'Proposer'", "import path")),
    ("window order", NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 3}, ("prompt_lookup_min is 5", "prompt_lookup_max 3")),
    ("window below 1", NGRAM | {"prompt_lookup_min": 0}, ("prompt_lookup_min is 0",)),
    ("tree depth", {"method": "suffix", "suffix_decoding_max_tree_depth": 0}, ("suffix_decoding_max_tree_depth is 0", "at least 1")),
    ("cached requests", {"method": "suffix", "suffix_decoding_max_cached_requests": -1}, ("suffix_decoding_max_cached_requests is -1",)),
    ("spec factor", {"method": "suffix", "suffix_decoding_max_spec_factor": -0.5}, ("suffix_decoding_max_spec_factor is -0.5",)),
    ("token prob", {"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, ("suffix_decoding_min_token_prob is 1.5", "at most 1")),
    ("head quantization", NGRAM | {"draft_lm_head_quantization": "fp8"}, ("draft_lm_head_quantization",)),
    ("head quantization of eagle", EAGLE | {"draft_lm_head_quantization": "nvfp4"}, ("draft_lm_head_quantization",)),
    ("xpress elsewhere", EAGLE | {"xpress_topc": 8}, ("xpress_topc does not apply", "`dflash`")),
    ("xpress range", {"method": "dflash", "model": "o/h", "xpress_topc": -1}, ("xpress_topc is -1",)),
    ("topk elsewhere", EAGLE | {"dspark_draft_topk": 8}, ("dspark_draft_topk does not apply", "`dspark`")),
    ("topk range", DSPARK | {"dspark_draft_topk": 0}, ("dspark_draft_topk is 0", "at least 1")),
    ("index share elsewhere", EAGLE | {"index_share_for_mtp_iteration": True}, ("index_share_for_mtp_iteration does not apply", "`mtp`")),
    (
        "adaptive + local argmax",
        EAGLE | {"enable_adaptive_verification": True, "use_local_argmax_reduction": True},
        ("use_local_argmax_reduction",),
    ),
    ("adaptive without logits", NGRAM | {"enable_adaptive_verification": True}, ("enable_adaptive_verification does not apply",)),
    ("synthetic without source", NGRAM | {"rejection_sample_method": "synthetic"}, ("exactly one", "neither")),
    (
        "synthetic with both",
        NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1, 1, 1, 1], "synthetic_acceptance_length": 2},
        ("exactly one", "both"),
    ),
    ("rates length", NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5]}, ("has 1 entries", "is 4")),
    ("rates range", NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.5, 1, 1, 0]}, ("1.5", "[0, 1]")),
    (
        "rates order",
        NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.1, 0.5, 0, 0]},
        ("must not increase",),
    ),
    ("length range", NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 5.5}, ("is 5.5", "[1, 5]")),
    ("length below 1", NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 0.5}, ("is 0.5", "[1, 5]")),
    ("rates elsewhere", NGRAM | {"synthetic_acceptance_rates": [1, 1, 1, 1]}, ("synthetic_acceptance_rates", "`synthetic`", "`standard`")),
    ("mean elsewhere", NGRAM | {"synthetic_acceptance_length": 2}, ("synthetic_acceptance_length", "`synthetic`")),
    ("fly key elsewhere", NGRAM | {"fly_window_size": 2}, ("fly_window_size", "`fly`")),
    ("vocabulary map elsewhere", EAGLE | {"use_heterogeneous_vocab": True}, ("use_heterogeneous_vocab does not apply", "`draft_model`")),
    (
        "vocabulary map + argmax",
        DRAFT | {"use_heterogeneous_vocab": True, "use_local_argmax_reduction": True},
        ("use_local_argmax_reduction",),
    ),
    ("fly without drafts", HIDDEN | {"rejection_sample_method": "fly"}, ("rejection_sample_method is `fly`", "extract_hidden_states")),
    (
        "fly with one draft",
        NGRAM | {"num_speculative_tokens": 1, "rejection_sample_method": "fly"},
        ("num_speculative_tokens is 1", "at least 2"),
    ),
    ("fly window", NGRAM | {"rejection_sample_method": "fly", "fly_window_size": 4}, ("fly_window_size is 4", "smaller than", "4")),
    ("hidden states k", HIDDEN | {"num_speculative_tokens": 2}, ("num_speculative_tokens is 2", "takes 1")),
    ("hidden states sampling", HIDDEN | {"draft_sample_method": "probabilistic"}, ("draft_sample_method is `probabilistic`",)),
    (
        "sampled lookup drafts",
        NGRAM | {"draft_sample_method": "probabilistic"},
        ("draft_sample_method is `probabilistic`", "no draft logits"),
    ),
    ("sequential dspark", DSPARK | {"parallel_drafting": False}, ("parallel_drafting is false",)),
    ("weights for a lookup", NGRAM | {"model": "org/small"}, ("model is 'org/small'", "no weights")),
    ("schedule empty", NGRAM | {SCHEDULE: []}, (SCHEDULE, "empty")),
    ("schedule not a list", NGRAM | {SCHEDULE: 3}, (SCHEDULE, "must be a list")),
    ("schedule pair", NGRAM | {SCHEDULE: [[1, 4]]}, (f"{SCHEDULE}[0]", "3 items")),
    ("schedule bounds", NGRAM | {SCHEDULE: [[0, 4, 1]]}, ("0..4", "start at 1")),
    ("schedule swapped", NGRAM | {SCHEDULE: [[4, 1, 1]]}, ("4..1", "must not exceed")),
    ("schedule negative", NGRAM | {SCHEDULE: [[1, 4, -1]]}, ("-1 drafts",)),
    ("schedule overlap", NGRAM | {SCHEDULE: [[1, 4, 3], [4, 8, 1]]}, ("overlapping", "1..4", "4..8")),
    ("schedule gap at 1", NGRAM | {SCHEDULE: [[2, 4, 3]]}, ("starts at batch size 2",)),
    ("schedule + adaptive", NGRAM | {SCHEDULE: [[1, 4, 3]], "policy": "adaptive"}, (SCHEDULE, "adaptive")),
    ("typical key elsewhere", NGRAM | {"typical_acceptance_sampler_posterior_alpha": 0.2}, ("`typical`", "`standard`")),
    ("exit layer", {"method": "early_exit", "num_speculative_tokens": 2, "exit_layer": 0}, ("exit_layer is 0",)),
]


@pytest.mark.parametrize(("data", "fragments"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_bad_input_is_refused_by_field_value_and_rule(data: dict[str, Any], fragments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(data)
    for fragment in fragments:
        assert fragment in caught.value.message


GOOD: list[dict[str, Any]] = [
    NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1, 0.5, 0.5, 0]},
    NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 5},
    NGRAM | {"rejection_sample_method": "fly", "fly_window_size": 3, "fly_entropy_threshold": 0.0, "fly_entropy_top_k": 1},
    NGRAM | {"rejection_sample_method": "typical", "typical_acceptance_sampler_posterior_threshold": 0.1},
    NGRAM | {SCHEDULE: [[5, 8, 0], [1, 4, 9]]},
    NGRAM | {"enforce_eager": True, "model": "ngram"},
    NGRAM | {"enforce_eager": False},
    EAGLE | {"draft_tensor_parallel_size": 1, "draft_sample_method": "coupled"},
    DRAFT | {"use_heterogeneous_vocab": True, "draft_sample_method": "greedy"},
]


@pytest.mark.parametrize("data", GOOD)
def test_the_neighbours_of_bad_input_are_taken(data: dict[str, Any]) -> None:
    assert build(data).num_speculative_tokens == 4


def test_the_window_of_fly_defaults_to_six_or_one_less_than_the_drafts() -> None:
    fly = {"rejection_sample_method": "fly"}
    assert build(NGRAM | fly).effective_fly_window_size == 3
    assert build(NGRAM | fly | {"num_speculative_tokens": 20}).effective_fly_window_size == 6


@pytest.mark.parametrize(("asked", "fragment"), [(300, "draft reads at most 256"), (200, "target's max_model_len is 128")])
def test_the_drafters_length_stays_within_both_models(asked: int, fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment):
        compatibility.check_draft_lengths(asked, draft_limit=256, target_limit=128)
    compatibility.check_draft_lengths(128, draft_limit=256, target_limit=128)
    compatibility.check_draft_lengths(None, draft_limit=1, target_limit=1)
