"""Which method a checkpoint is for, and whether its sizes fit."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.config.compatibility import check_options, check_sizes, check_vocabularies, flatten, settle_num_speculative_tokens
from specdec.config.inference import CheckpointKind, checkpoint_kind, is_import_path, method_from_name, mtp_depth, settle_method
from specdec.config.speculative import build
from specdec.errors import ConfigError

LM = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, "eagle3"),
        ({"architectures": ["PEagleDraftModel"]}, "eagle3"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"architectures": ["LiLiCorrDraftModel"]}, "dflash"),
        ({"architectures": ["Qwen3XPressModel"]}, "dflash"),
        ({"architectures": ["MuseGlimmerAssistantModel"]}, "dflash"),
        ({"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}, "dspark"),
        ({"architectures": ["DeepSeekMTPModel"]}, "mtp"),
        ({"model_type": "gemma4_assistant"}, "mtp"),
        ({"model_type": "medusa"}, "medusa"),
        ({"medusa_num_heads": 4, "base_model_name_or_path": "org/base"}, "medusa"),
        ({"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"]}, "mlp_speculator"),
        ({"speculators_model_type": "peagle"}, "eagle3"),
        ({"speculators_model_type": "dflash2"}, "dflash"),
        (LM | {"draft_vocab_size": 32000}, "eagle3"),
        (LM | {"dflash_config": {}}, "dflash"),
        (LM, None),
    ],
)
def test_the_checkpoint_says_what_it_is(config: dict[str, Any], method: str | None) -> None:
    kind = checkpoint_kind(config)
    assert kind.method == method
    assert (method or "draft_model") in kind.allowed


def test_an_ordinary_model_can_be_a_draft_model_or_an_eagle_head_but_not_medusa() -> None:
    kind = checkpoint_kind(LM)
    assert settle_method("draft_model", is_inferred=True, kind=kind) == "draft_model"
    assert settle_method("eagle", is_inferred=False, kind=kind) == "eagle"
    with pytest.raises(ConfigError) as caught:
        settle_method("medusa", is_inferred=False, kind=kind)
    assert "`medusa`" in caught.value.message
    assert "LlamaForCausalLM" in caught.value.message
    assert "draft_model" in str(caught.value.hint)


def test_a_guess_gives_way_to_the_checkpoint_with_a_warning(package_log: pytest.LogCaptureFixture) -> None:
    kind = CheckpointKind("eagle3", frozenset({"eagle3"}), "architecture Eagle3LlamaForCausalLM")
    assert settle_method("draft_model", is_inferred=True, kind=kind) == "eagle3"
    assert "draft_model" in package_log.text
    assert "eagle3" in package_log.text


def test_unknown_speculators_families_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'tree'.*eagle3, peagle, dflash, dflash2, dspark"):
        checkpoint_kind({"speculators_model_type": "tree"})


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("pkg.Class", True),
        ("a.b.c", True),
        ("Class", False),
        ("org/name", False),
        ("https://x.y", False),
        ("model.gguf", False),
        ("v1.5", False),
    ],
)
def test_import_paths_look_like_identifiers_joined_by_dots(model: str, expected: bool) -> None:
    assert is_import_path(model) is expected


def test_name_hints_read_the_last_part_only() -> None:
    assert method_from_name("org/EAGLE3-head/") == "eagle3"
    assert method_from_name("/eagle3/plain") is None


@pytest.mark.parametrize(
    ("config", "depth"),
    [
        ({"num_nextn_predict_layers": 2}, 2),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, 1),
        ({"mtp_config": {"num_nextn_predict_layers": 8}}, 8),
        ({"model_type": "step3p5"}, 1),
        ({"num_nextn_predict_layers": 0}, None),
        (LM, None),
    ],
)
def test_depth_of_mtp_layers(config: dict[str, Any], depth: int | None) -> None:
    assert mtp_depth(config) == depth


@pytest.mark.parametrize(
    ("method", "keys", "expected"),
    [
        ("mtp", {"num_nextn_predict_layers": 3}, 3),
        ("mlp_speculator", {"n_predict": 3}, 3),
        ("medusa", {"num_heads": 5}, 5),
        ("medusa", {"medusa_num_heads": 4}, 4),
        ("dspark", {"block_size": 7}, 7),
        ("dspark", {"dspark_block_size": 6}, 6),
        ("dflash", {"block_size": 16}, 15),
        ("eagle3", {"speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}}, 3),
    ],
)
def test_the_length_defaults_to_what_the_checkpoint_was_trained_for(method: str, keys: dict[str, Any], expected: int) -> None:
    assert settle_num_speculative_tokens(method, None, keys) == (expected, "checkpoint")
    assert settle_num_speculative_tokens(method, 1, keys) == (1, "user")


def test_no_length_anywhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens is missing"):
        settle_num_speculative_tokens("eagle", None, LM)


@pytest.mark.parametrize(
    ("method", "keys"),
    [("mtp", {"n_predict": 3}), ("medusa", {"num_heads": 3}), ("dflash", {"block_size": 4}), ("dspark", {"block_size": 3})],
)
def test_more_drafts_than_trained_are_refused_with_the_limit(method: str, keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        settle_num_speculative_tokens(method, 4, keys)
    assert "is 4" in caught.value.message
    assert "at most 3" in caught.value.message
    assert next(iter(keys)) in caught.value.message


def test_mtp_layers_may_run_a_whole_number_of_times(package_log: pytest.LogCaptureFixture) -> None:
    assert settle_num_speculative_tokens("mtp", 6, {"n_predict": 3}) == (6, "user")
    assert "accepted less" in package_log.text


def test_parse_aux_has_one_step() -> None:
    with pytest.raises(ConfigError, match="must be 1"):
        settle_num_speculative_tokens("mtp", 2, {"architectures": ["ParseAuxMTPModel"], "n_predict": 1})


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "dflash", "dspark", "medusa", "mlp_speculator"])
def test_heads_must_have_the_targets_width_and_vocabulary(method: str) -> None:
    target = {"hidden_size": 64, "vocab_size": 100}
    check_sizes(method, {"hidden_size": 64, "vocab_size": 100, "draft_vocab_size": 10}, target)
    check_sizes(method, {"hidden_size": 32, "target_hidden_size": 64}, target)
    for draft, numbers in (({"hidden_size": 32}, "32.*64"), ({"vocab_size": 120}, "120.*100"), ({"draft_vocab_size": 101}, "101.*100")):
        with pytest.raises(ConfigError, match=numbers):
            check_sizes(method, draft, target)


def test_a_draft_model_may_have_any_width() -> None:
    check_sizes("draft_model", {"hidden_size": 32, "vocab_size": 120}, {"hidden_size": 64, "vocab_size": 100})


def test_vocabularies_are_compared_by_token() -> None:
    target = {"a": 0, "b": 1, "c": 2}
    check_vocabularies(dict(target), target, draft_size=3, target_size=3)
    with pytest.raises(ConfigError, match=r"vocabulary 3 .* vocabulary 3: token 'b' is id 1 in the target and id 2 in the draft"):
        check_vocabularies({"a": 0, "c": 1, "b": 2}, target, draft_size=3, target_size=3)
    with pytest.raises(ConfigError, match=r"2 .* 3: token 'c' is id 2 in the target and missing in the draft"):
        check_vocabularies({"a": 0, "b": 1}, target, draft_size=2, target_size=3)


def test_padding_rows_may_differ_with_a_notice(package_log: pytest.LogCaptureFixture) -> None:
    check_vocabularies({"a": 0}, {"a": 0}, draft_size=500, target_size=512)
    assert "500" in package_log.text
    assert "512" in package_log.text


def test_speculators_configs_are_flattened_or_refused() -> None:
    flat = flatten({"speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": 8}, "draft_vocab_size": 4})
    assert (flat["hidden_size"], flat["draft_vocab_size"]) == (8, 4)
    with pytest.raises(ConfigError, match="transformer_layer_config"):
        flatten({"speculators_model_type": "eagle3"})
    with pytest.raises(ConfigError, match="aux_hidden_state_layer_ids"):
        flatten({"speculators_model_type": "dflash", "transformer_layer_config": {}})
    with pytest.raises(ConfigError, match="no proposal_methods"):
        settle_num_speculative_tokens("eagle3", 2, {"speculators_model_type": "eagle3"})
    with pytest.raises(ConfigError, match="no speculative_tokens"):
        settle_num_speculative_tokens("eagle3", 2, {"speculators_config": {"proposal_methods": [{}]}})


XPRESS = {"architectures": ["Qwen3XPressModel"], "vocab_size": 100}
QWEN_DSPARK = {"architectures": ["Qwen3DSparkModel"], "vocab_size": 100, "draft_vocab_size": 50}


@pytest.mark.parametrize(
    ("spec", "keys", "fragment"),
    [
        ({"method": "dflash", "xpress_topc": 8}, {"architectures": ["DFlashDraftModel"]}, "only XPress"),
        ({"method": "dflash", "xpress_topc": 101}, XPRESS, "between 0 and the draft vocabulary 100"),
        ({"method": "dspark", "dspark_draft_topk": 8}, {"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
        ({"method": "dspark", "dspark_draft_topk": 51}, QWEN_DSPARK, "between 1 and the draft vocabulary 50"),
        ({"method": "dflash"}, {"dflash_config": {"sample_from_anchor": True}}, "sample_from_anchor"),
        ({"method": "mtp"}, {"model_type": "deepseek_v41"}, "DSpark stages"),
        ({"method": "mtp"}, {"mtp_layer_types": ["full"], "num_nextn_predict_layers": 2}, "1 entries for 2 MTP layers"),
        ({"method": "eagle3", "parallel_drafting": True}, {}, "no mask token"),
        ({"method": "draft_model", "parallel_drafting": True}, {"pard_token": None}, "no mask token"),
    ],
)
def test_keys_that_the_checkpoint_cannot_honour_are_refused(spec: dict[str, Any], keys: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment):
        check_options(build({"model": "org/head", "num_speculative_tokens": 2, **spec}), keys)


@pytest.mark.parametrize(
    ("spec", "keys"),
    [
        ({"method": "dflash", "xpress_topc": 100}, XPRESS),
        ({"method": "dspark", "dspark_draft_topk": 50}, QWEN_DSPARK),
        ({"method": "mtp"}, {"mtp_layer_types": ["full"], "num_nextn_predict_layers": 1}),
        ({"method": "eagle3", "parallel_drafting": True}, {"pard_token": 5}),
        ({"method": "draft_model", "parallel_drafting": True}, {"dflash_config": {"mask_token_id": 0}}),
    ],
)
def test_keys_that_the_checkpoint_can_honour_pass(spec: dict[str, Any], keys: dict[str, Any]) -> None:
    check_options(build({"model": "org/head", "num_speculative_tokens": 2, **spec}), keys)
