"""--speculative-config as text or mapping, and its short flags."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config import speculative
from specdec.config.inference import MTP_ALIASES
from specdec.config.parse import REFUSED_KEYS
from specdec.config.speculative import METHODS, MODELS, NgramConfig, build, built_methods, default_speculative, parse_speculative
from specdec.errors import ConfigError
from specdec.proposers.base import REGISTRY

# fmt: off
VLLM_KEYS = (
    "method", "model", "num_speculative_tokens", "enforce_eager", "draft_tensor_parallel_size", "tensor_parallel_size", "quantization",
    "moe_backend", "attention_backend", "kv_cache_dtype", "max_model_len", "revision", "code_revision", "index_share_for_mtp_iteration",
    "disable_padded_drafter_batch", "disable_eagle_block_drop", "disable_lookahead_block_hashes", "draft_lm_head_quantization",
    "use_local_argmax_reduction", "use_heterogeneous_vocab", "prompt_lookup_max", "prompt_lookup_min", "parallel_drafting",
    "num_speculative_tokens_per_batch_size", "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob", "draft_load_config", "rejection_sample_method",
    "synthetic_acceptance_rates", "synthetic_acceptance_length", "enable_adaptive_verification", "draft_sample_method",
    "dspark_draft_topk", "xpress_topc", "fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k", "target_model_config",
    "target_parallel_config", "draft_model_config", "draft_parallel_config",
)
# fmt: on
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def refused(raw: Any, **flags: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_speculative(raw, **flags)
    return caught.value


def test_nothing_said_is_nothing_configured() -> None:
    assert parse_speculative(None) is None
    assert parse_speculative() is None


def test_a_vllm_string_works_unchanged() -> None:
    config = parse_speculative('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}')
    assert isinstance(config, NgramConfig)
    assert (config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max) == (5, 2, 4)


def test_text_and_mapping_and_parsed_config_agree() -> None:
    config = parse_speculative(NGRAM)
    assert parse_speculative(json.dumps(NGRAM)) == config == parse_speculative(config)


def test_the_callers_mapping_is_left_alone() -> None:
    raw = {"method": "ngram"}
    parse_speculative(raw, spec_tokens=3)
    assert raw == {"method": "ngram"}


@pytest.mark.parametrize(
    ("given_bounds", "expected"),
    [({}, (5, 5)), ({"prompt_lookup_max": 3}, (3, 3)), ({"prompt_lookup_min": 2}, (2, 2)), ({"prompt_lookup_min": None}, (5, 5))],
)
def test_one_window_bound_sets_both(given_bounds: dict[str, Any], expected: tuple[int, int]) -> None:
    config = parse_speculative(NGRAM | given_bounds)
    assert isinstance(config, NgramConfig)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == expected


def test_configs_are_frozen() -> None:
    config = parse_speculative(NGRAM)
    assert config is not None
    with pytest.raises(ValueError, match="frozen"):
        config.num_speculative_tokens = 7


def test_malformed_json_names_line_and_column() -> None:
    error = refused('{"method": "ngram",\n num_speculative_tokens: 3}')
    assert "line 2, column 2" in error.message
    assert error.hint is not None
    assert "'{" in error.hint


@pytest.mark.parametrize("raw", ["", "[1]", "3", '"ngram"', "null", "{} {}", '{"a": NaN}', [1]])
def test_anything_but_one_json_object_is_refused(raw: Any) -> None:
    assert "speculative_config" in refused(raw).message


def test_a_key_given_twice_is_refused() -> None:
    assert (
        "num_speculative_tokens twice" in refused('{"method": "ngram", "num_speculative_tokens": 1, "num_speculative_tokens": 2}').message
    )
    assert "num_speculative_tokens twice" in refused({"num_speculative_tokens": 1, "num-speculative-tokens": 1}).message


def test_dashes_in_keys_are_underscores() -> None:
    assert parse_speculative({"method": "ngram", "num-speculative-tokens": 4}) == parse_speculative(NGRAM)


@pytest.mark.parametrize(
    ("flags", "raw"),
    [
        ({"spec_tokens": 3}, {"method": "ngram", "num_speculative_tokens": 4}),
        ({"spec_tokens": 3}, {"method": "ngram", "num-speculative-tokens": 4}),
        ({"spec_method": "ngram"}, NGRAM),
        ({"spec_model": "ngram"}, {"model": "x/y"}),
    ],
)
def test_a_flag_and_its_key_exclude_each_other_in_either_spelling(flags: dict[str, Any], raw: dict[str, Any]) -> None:
    error = refused(raw, **flags)
    assert "mutually exclusive" in error.message
    assert "--spec-" in error.message


def test_short_flags_make_a_config_alone_and_complete_one() -> None:
    assert parse_speculative(spec_method="ngram", spec_tokens=4) == parse_speculative(NGRAM)
    assert parse_speculative({"method": "ngram"}, spec_tokens=4) == parse_speculative(NGRAM)


def test_a_near_miss_is_suggested() -> None:
    error = refused({"method": "ngram", "num_spec_tokens": 4})
    assert error.message == "unknown field `num_spec_tokens` for method `ngram`"
    assert error.hint == "did you mean `num_speculative_tokens`?"
    assert refused({"method": "ngrm"}).hint == "did you mean `ngram`?"
    assert refused(NGRAM | {"policy": "fixd"}).hint == "did you mean `fixed`?"


def test_an_unknown_key_that_resembles_nothing_lists_what_there_is() -> None:
    assert "prompt_lookup_max" in str(refused(NGRAM | {"zzz": 1}).hint)


def test_a_key_of_another_method_says_whose_it_is() -> None:
    message = refused({"method": "eagle3", "model": "org/head", "prompt_lookup_max": 3}).message
    assert "does not apply to method `eagle3`" in message
    assert "`ngram`, `ngram_gpu`" in message


@pytest.mark.parametrize("value", ["4", True, 4.0, 0, -1, [4], {}])
def test_a_length_is_an_integer_of_at_least_one(value: Any) -> None:
    message = refused({"method": "ngram", "num_speculative_tokens": value}).message
    assert "num_speculative_tokens" in message
    assert repr(value) in message


@pytest.mark.parametrize("key", sorted(REFUSED_KEYS))
def test_a_key_without_meaning_here_is_refused_by_name_unless_it_asks_for_nothing(key: str) -> None:
    error = refused(NGRAM | {key: "fp8"})
    assert error.message.startswith(f"speculative_config.{key} ")
    assert error.hint
    for neutral in REFUSED_KEYS[key][0]:
        assert parse_speculative(NGRAM | {key: neutral}) == parse_speculative(NGRAM)


def test_every_key_of_vllm_is_known_or_refused_by_name() -> None:
    known = {name for model in MODELS.values() for name in model.model_fields}
    assert set(VLLM_KEYS) <= known | set(REFUSED_KEYS)


def test_methods_are_inferred_from_the_model() -> None:
    def inferred(model: str) -> str:
        return build({"model": model, "num_speculative_tokens": 3}).method

    assert inferred("ngram") == inferred("[ngram]") == "ngram"
    assert inferred("my_package.drafts.Proposer") == "custom_class"
    assert inferred("org/EAGLE3-LLaMA-8B") == "eagle3"
    assert inferred("org/eagle-llama") == "eagle"
    assert inferred("org/Qwen3-DFlash") == "dflash"
    assert inferred("org/qwen3-dspark-b8") == "dspark"
    assert inferred("org/small-lm") == "draft_model"
    assert inferred("/data/eagle-heads/small-lm") == "draft_model", "a parent directory is no hint"


def test_only_a_guessed_method_may_be_overruled() -> None:
    assert build({"model": "org/small", "num_speculative_tokens": 3}).is_method_inferred
    assert not build({"method": "draft_model", "model": "org/small", "num_speculative_tokens": 3}).is_method_inferred


def test_an_explicit_method_is_not_changed_by_the_name() -> None:
    assert build({"method": "draft_model", "model": "org/eagle-small", "num_speculative_tokens": 3}).method == "draft_model"


def test_a_model_that_is_a_method_is_explained() -> None:
    assert refused({"model": "suffix"}).hint == 'write "method": "suffix"'


@pytest.mark.parametrize("alias", sorted(MTP_ALIASES))
def test_deprecated_names_of_mtp_warn_and_work(alias: str, package_log: pytest.LogCaptureFixture) -> None:
    assert build({"method": alias}).method == "mtp"
    assert alias in package_log.text
    assert "mtp" in package_log.text


def test_there_are_27_aliases() -> None:
    assert len(MTP_ALIASES) == 27


def test_a_method_that_is_not_built_is_named_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(REGISTRY, "ngram")
    monkeypatch.setitem(REGISTRY, "suffix", "nowhere:Nothing")
    error = refused(NGRAM)
    assert "`ngram`" in error.message
    assert "not built" in error.message
    assert "suffix" in str(error.hint)
    assert parse_speculative({"method": "suffix"}) is not None


def test_rules_options_and_policies_that_are_not_built_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "BUILT_RULES", frozenset({"standard"}))
    monkeypatch.setattr(speculative, "BUILT_POLICIES", frozenset({"fixed"}))
    monkeypatch.setattr(speculative, "UNBUILT_OPTIONS", frozenset({"enforce_eager"}))
    assert "`block`" in refused(NGRAM | {"rejection_sample_method": "block"}).message
    assert "`adaptive`" in refused(NGRAM | {"policy": "adaptive"}).message
    assert "enforce_eager" in refused(NGRAM | {"enforce_eager": True}).message


def test_the_registry_decides_what_is_built() -> None:
    assert built_methods() == set(REGISTRY)
    assert built_methods() <= set(METHODS)


def test_the_default_passes_the_users_checks() -> None:
    assert parse_speculative(default_speculative()) == default_speculative()


def test_suffix_drafts_up_to_its_tree_depth() -> None:
    assert build({"method": "suffix"}).num_speculative_tokens == 24
    assert build({"method": "suffix", "suffix_decoding_max_tree_depth": 7}).num_speculative_tokens == 7
    assert build({"method": "suffix", "num_speculative_tokens": 3}).num_speculative_tokens == 3


def test_hidden_states_take_vllms_shape() -> None:
    config = build({"method": "extract_hidden_states", "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [3, 1]}}})
    assert config.num_speculative_tokens == 1
    with pytest.raises(ConfigError, match="draft_model_config is missing"):
        build({"method": "extract_hidden_states"})


def test_a_hybrid_hands_its_length_and_rule_to_its_sources() -> None:
    sources = [{"method": "ngram"}, {"method": "suffix"}]
    config = build({"method": "hybrid", "num_speculative_tokens": 4, "rejection_sample_method": "block", "sources": sources})
    assert isinstance(config, speculative.HybridConfig)
    assert [source.num_speculative_tokens for source in config.sources] == [4, 4]
    assert {source.rejection_sample_method for source in config.inherited_sources()} == {"block"}


@pytest.mark.parametrize(
    ("sources", "fragment"),
    [
        ([{"method": "ngram", "num_speculative_tokens": 2}], "at least 2"),
        ([{"method": "ngram", "num_speculative_tokens": 2}] * 2, "may occur once"),
        ([{"method": "ngram"}, {"method": "suffix"}], "sources[0].num_speculative_tokens is missing"),
        ([{"method": "suffix"}, {"method": "ngram", "num_speculative_tokens": 2, "foo": 1}], "sources[1]"),
        ([{"method": "suffix"}, {"method": "hybrid", "sources": []}], "cannot be a source"),
        ([{"method": "suffix", "policy": "fixed"}, {"method": "ngram", "num_speculative_tokens": 2}], "sources[0].policy"),
        ("ngram", "sources"),
        ([], "sources"),
    ],
)
def test_sources_of_a_hybrid_are_checked_and_named(sources: Any, fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build({"method": "hybrid", "sources": sources})
    assert fragment in caught.value.message


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_value_gives_a_config_or_an_error_of_ours(value: Any) -> None:
    for raw in (value, {"method": value}, {"model": value}, NGRAM | {"prompt_lookup_min": value}, {"method": "hybrid", "sources": value}):
        with suppress(ConfigError):
            parse_speculative(raw)
