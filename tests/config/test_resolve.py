"""resolve(): checkpoints on disk against what was asked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.config import resolve as resolve_module
from specdec.config import speculative
from specdec.config.engine import CacheConfig, EngineConfig, ExecutionConfig, ModelConfig, ResolvedConfig, SchedulerConfig
from specdec.config.methods import FINAL_NORM
from specdec.config.resolve import default_speculative, probe_dtype, resolve
from specdec.config.speculative import build
from specdec.errors import ConfigError
from specdec.proposers.base import REGISTRY
from tests.config.checkpoints import LLAMA, TOKENS, write_checkpoint, write_model, write_tokenizer


@pytest.fixture
def target(tmp_path: Path) -> str:
    return write_model(tmp_path / "target")


@pytest.fixture
def all_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every method resolve, so that the checks of checkpoints are reached before the methods themselves exist."""
    for method in speculative.METHODS:
        monkeypatch.setitem(REGISTRY, method, "nowhere:Nothing")
    monkeypatch.setattr(speculative, "UNBUILT_OPTIONS", frozenset())


def engine(model: str, spec: dict[str, Any] | None = None, **options: Any) -> EngineConfig:
    scheduler = SchedulerConfig(max_num_batched_tokens=options.pop("max_num_batched_tokens", 2048))
    return EngineConfig(
        model=ModelConfig(model=model, **{"dtype": "float32", **options}),
        scheduler=scheduler,
        speculative=build(spec) if spec else None,
        device="cpu",
    )


def resolve_draft(model: str, spec: dict[str, Any]) -> ResolvedConfig:
    return resolve(engine(model, spec))


def error_of(config: EngineConfig) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(config)
    return caught.value


def rows(resolved: ResolvedConfig) -> dict[str, tuple[object, str]]:
    return {row.name: (row.value, row.source) for row in resolved.report}


def test_a_directory_resolves_to_its_own_values(target: str) -> None:
    resolved = resolve(engine(target))
    assert (resolved.model_path, resolved.tokenizer_path) == (target, target)
    assert (resolved.max_model_len, resolved.vocab_size, resolved.eos_token_ids) == (512, len(TOKENS), (1,))
    assert (resolved.dtype, resolved.device, resolved.served_model_name) == ("float32", "cpu", "target")
    assert resolved.hf_config.num_hidden_layers == 8
    assert resolved.traits is None
    assert resolved.num_lookahead_tokens == 0


def test_the_report_says_where_each_value_came_from(target: str) -> None:
    found = rows(resolve(engine(target, {"method": "ngram", "num_speculative_tokens": 4}, max_model_len=100, served_model_name="mine")))
    assert found["model.dtype"] == ("float32", "user")
    assert found["model.max_model_len"] == (100, "user")
    assert found["model.served_model_name"] == ("mine", "user")
    assert found["model.tokenizer"] == (target, "derived")
    assert found["model.vocab_size"] == (len(TOKENS), "checkpoint")
    assert found["cache.block_size"] == (16, "default")
    assert found["speculative.num_speculative_tokens"] == (4, "user")
    assert found["speculative.prompt_lookup_max"] == (5, "default")
    assert "speculative.fly_entropy_top_k" not in found, "a key of a rule that is not in force"
    assert rows(resolve(engine(target)))["speculative"] == ("off", "user")
    assert rows(resolve(engine(target)))["model.max_model_len"] == (512, "checkpoint")


def test_callers_may_say_what_the_user_typed(target: str) -> None:
    found = rows(resolve(engine(target), sources={"cache.block_size": "user", "speculative": "default"}))
    assert found["cache.block_size"] == (16, "user")
    assert found["speculative"] == ("off", "default")


def test_the_default_drafting_is_reported_as_default(target: str) -> None:
    config = EngineConfig(model=ModelConfig(model=target), speculative=default_speculative(), device="cpu")
    resolved = resolve(config)
    assert rows(resolved)["speculative.method"][1] == "default"
    assert rows(resolved)["speculative.num_speculative_tokens"][1] == "default"
    assert resolved.traits is not None
    assert resolved.traits.max_nodes == default_speculative().num_speculative_tokens


def test_a_longer_context_than_the_checkpoints_is_refused(target: str) -> None:
    error = error_of(engine(target, max_model_len=513))
    assert "513" in error.message
    assert "512" in error.message
    assert resolve(engine(target, max_model_len=512)).max_model_len == 512


def test_a_checkpoint_without_positions_needs_the_users_word(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    keys = {"num_hidden_layers": 1}
    with pytest.raises(ConfigError, match="max_model_len is not set"):
        resolve_module._resolve_max_model_len(None, keys)
    assert resolve_module._resolve_max_model_len(7, keys) == (7, "user")


def test_end_tokens_come_from_everywhere(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", {"eos_token_id": 2})
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert resolve(engine(path)).eos_token_ids == (1, 2, 3, 4)


def test_end_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", {"eos_token_id": 99})
    assert "[99]" in error_of(engine(path)).message


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    assert "no such directory" in error_of(engine(str(tmp_path / "nothing"))).message
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json is missing" in error_of(engine(str(empty))).message
    (empty / "config.json").write_text("{")
    assert "cannot be read" in error_of(engine(str(empty))).message
    (empty / "config.json").write_text(json.dumps(LLAMA))
    assert "no .safetensors" in error_of(engine(str(empty))).message


def test_an_unknown_model_type_is_one_line(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", {"model_type": "nonesuch"})
    error = error_of(engine(path))
    assert "nonesuch" in error.message
    assert "\n" not in error.message


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path, target: str) -> None:
    bare = write_checkpoint(tmp_path / "bare")
    error = error_of(engine(bare))
    assert "has no tokenizer files" in error.message
    assert "--tokenizer" in str(error.hint)
    assert resolve(engine(bare, tokenizer=target)).tokenizer_path == target
    assert "is not a directory" in error_of(engine(bare, tokenizer=str(tmp_path / "none"))).message


def test_auto_dtype_is_what_the_probe_says(target: str) -> None:
    expected = probe_dtype("cpu")
    assert expected in ("bfloat16", "float32")
    assert resolve(engine(target, dtype="auto")).dtype == expected


def test_float16_on_a_cpu_is_refused(target: str) -> None:
    assert "float16" in error_of(engine(target, dtype="float16")).message


@pytest.mark.parametrize(
    ("execution", "fragment"),
    [
        ({"cudagraph_capture_sizes": (1, 2)}, "a CPU has no CUDA graphs"),
        ({"attention_backend": "sdpa"}, "on a CPU attention is part of the compiled layers"),
    ],
)
def test_options_of_a_gpu_are_refused_on_a_cpu(target: str, execution: dict[str, Any], fragment: str) -> None:
    assert fragment in error_of(replace(engine(target), execution=ExecutionConfig(**execution))).message
    assert resolve(replace(engine(target), execution=ExecutionConfig(enforce_eager=True))).device == "cpu", "it is eager anyway"


def test_an_attention_backend_without_its_package_is_refused(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.config.resolve.probe_device", lambda _asked: "cuda")
    monkeypatch.setattr("specdec.config.resolve.find_spec", lambda _name: None)
    error = error_of(replace(engine(target), execution=ExecutionConfig(attention_backend="flashinfer")))
    assert "the package flashinfer is not installed" in error.message
    assert "pip install flashinfer-python" in str(error.hint)


@pytest.mark.parametrize(("name", "backend"), [("FLASHINFER", "flashinfer"), ("TRITON_ATTN", "triton"), ("sdpa", "sdpa")])
def test_attention_backends_have_their_names_in_vllm_too(name: str, backend: str) -> None:
    assert ExecutionConfig.backend_named(name) == backend
    with pytest.raises(ConfigError, match="'FLASH_ATTN', which specdec does not have"):
        ExecutionConfig.backend_named("FLASH_ATTN")


def test_a_gpu_that_is_not_there_is_refused(target: str) -> None:
    import torch

    if torch.cuda.is_available():
        assert resolve(EngineConfig(model=ModelConfig(model=target), device="cuda")).device == "cuda"
    else:
        assert "no GPU" in error_of(EngineConfig(model=ModelConfig(model=target), device="cuda")).message


@pytest.mark.parametrize(
    ("make", "fragment"),
    [
        (lambda: ModelConfig(dtype="float8"), "dtype is 'float8'"),  # type: ignore[arg-type]
        (lambda: ModelConfig(max_model_len=0), "max_model_len is 0"),
        (lambda: ModelConfig(model=""), "model is ''"),
        (lambda: CacheConfig(block_size=0), "block_size is 0"),
        (lambda: CacheConfig(num_blocks=0), "num_blocks is 0"),
        (lambda: CacheConfig(memory_fraction=1.5), "memory_fraction is 1.5"),
        (lambda: SchedulerConfig(max_num_seqs=0), "max_num_seqs is 0"),
        (lambda: SchedulerConfig(max_num_batched_tokens=0), "max_num_batched_tokens is 0"),
        (lambda: SchedulerConfig(max_waiting=-1), "max_waiting is -1"),
        (lambda: SchedulerConfig(policy="lifo"), "policy is 'lifo'"),  # type: ignore[arg-type]
        (lambda: EngineConfig(device="tpu"), "device is 'tpu'"),  # type: ignore[arg-type]
    ],
)
def test_static_ranges_hold_on_construction(make: Any, fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment):
        make()


def test_a_misspelt_environment_variable_is_named(
    target: str, monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPECDEC_LOG_LEVL", "DEBUG")
    monkeypatch.setenv("SPECDEC_KERNELS", "reference")
    found = rows(resolve(engine(target)))
    assert "SPECDEC_LOG_LEVL has no effect: did you mean SPECDEC_LOG_LEVEL?" in package_log.text
    assert found["environment.SPECDEC_KERNELS"] == ("reference", "user")


@pytest.mark.usefixtures("all_built")
def test_a_guessed_method_follows_the_checkpoint(tmp_path: Path, target: str) -> None:
    head = write_checkpoint(tmp_path / "head", {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1})
    resolved = resolve_draft(target, {"model": head, "num_speculative_tokens": 3})
    assert resolved.traits is not None
    assert (resolved.traits.method, resolved.traits.lookahead, resolved.traits.taps) == ("eagle3", 3, (2, 4, 5))
    assert resolved.engine.speculative is not None
    assert resolved.engine.speculative.method == "eagle3"
    assert resolved.draft_model_path == head
    assert resolved.draft_hf_config.hidden_size == 64


@pytest.mark.usefixtures("all_built")
def test_an_explicit_method_the_checkpoint_cannot_be_is_refused(tmp_path: Path, target: str) -> None:
    head = write_checkpoint(tmp_path / "head", {"architectures": ["LlamaForCausalLMEagle3"]})
    error = error_of(engine(target, {"method": "draft_model", "model": head, "num_speculative_tokens": 3}))
    assert "`draft_model`" in error.message
    assert "`eagle3`" in error.message


def test_a_checkpoint_may_not_smuggle_in_a_method_that_is_not_built(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "draft_model", "nowhere:Nothing")
    monkeypatch.delitem(REGISTRY, "medusa", raising=False)
    head = write_checkpoint(tmp_path / "heads", {"model_type": "medusa", "num_heads": 3})
    assert "not built" in error_of(engine(target, {"model": head})).message


@pytest.mark.usefixtures("all_built")
def test_heads_of_another_size_are_refused_with_both_numbers(tmp_path: Path, target: str) -> None:
    head = write_checkpoint(tmp_path / "head", {"hidden_size": 32})
    assert (
        "32 differs from target hidden size 64"
        in error_of(engine(target, {"method": "eagle", "model": head, "num_speculative_tokens": 3})).message
    )
    wide = write_checkpoint(tmp_path / "wide", {"vocab_size": 600})
    assert (
        "600 differs from target vocabulary 8"
        in error_of(engine(target, {"method": "eagle", "model": wide, "num_speculative_tokens": 3})).message
    )


@pytest.mark.usefixtures("all_built")
def test_a_draft_model_must_speak_the_targets_tokens(tmp_path: Path, target: str) -> None:
    spec = {"method": "draft_model", "num_speculative_tokens": 3}
    padded = write_model(tmp_path / "padded", {"vocab_size": 64, "hidden_size": 32})
    assert resolve_draft(target, spec | {"model": padded}).traits is not None
    permuted = write_model(tmp_path / "permuted", tokens=("<unk>", "<eos>", "b", "a", "c", "d", "e", "f"))
    assert "token 'a' is id 2 in the target and id 3 in the draft" in error_of(engine(target, spec | {"model": permuted})).message
    assert resolve_draft(target, spec | {"model": permuted, "use_heterogeneous_vocab": True}).traits is not None


@pytest.mark.usefixtures("all_built")
def test_the_length_comes_from_the_draft_checkpoint_and_is_reported(tmp_path: Path, target: str) -> None:
    head = write_checkpoint(tmp_path / "block", {"architectures": ["DFlashDraftModel"], "block_size": 4, "target_layer_ids": [1, 5]})
    resolved = resolve_draft(target, {"method": "dflash", "model": head})
    assert resolved.traits is not None
    assert (resolved.traits.max_nodes, resolved.traits.lookahead, resolved.traits.taps) == (3, 4, (2, 6))
    assert rows(resolved)["speculative.num_speculative_tokens"] == (3, "checkpoint")


@pytest.mark.usefixtures("all_built")
def test_keys_that_depend_on_the_length_are_checked_once_it_is_known(tmp_path: Path, target: str) -> None:
    head = write_checkpoint(tmp_path / "block", {"architectures": ["DFlashDraftModel"], "block_size": 4, "target_layer_ids": [1]})
    spec = {"method": "dflash", "model": head, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.5]}
    assert "has 2 entries" in error_of(engine(target, spec)).message


@pytest.mark.usefixtures("all_built")
def test_mtp_layers_are_looked_for_in_the_target(tmp_path: Path, target: str) -> None:
    error = error_of(engine(target, {"method": "mtp", "num_speculative_tokens": 1}))
    assert "no MTP layers" in error.message
    with_layers = write_model(tmp_path / "mtp", {"num_nextn_predict_layers": 2})
    resolved = resolve_draft(with_layers, {"method": "mtp"})
    assert resolved.traits is not None
    assert (resolved.traits.max_nodes, resolved.traits.prefill_lookahead, resolved.traits.taps) == (2, 2, (FINAL_NORM,))
    assert resolved.draft_model_path == with_layers
    assert "no DSpark stages" in error_of(engine(target, {"method": "dspark"})).message


@pytest.mark.usefixtures("all_built")
def test_a_missing_draft_names_its_key(target: str, tmp_path: Path) -> None:
    error = error_of(engine(target, {"method": "eagle", "model": str(tmp_path / "none"), "num_speculative_tokens": 2}))
    assert error.message.startswith("speculative_config.model: ")


@pytest.mark.usefixtures("all_built")
def test_drafters_unknown_to_transformers_keep_their_keys(tmp_path: Path, target: str) -> None:
    keys = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 3, "vocab_size": 8, "hidden_size": 64}
    head = write_checkpoint(tmp_path / "medusa", keys, base={})
    resolved = resolve_draft(target, {"method": "medusa", "model": head})
    assert resolved.draft_hf_config.num_heads == 3
    assert resolved.traits is not None
    assert resolved.traits.max_nodes == 3


@pytest.mark.usefixtures("all_built")
def test_an_exit_layer_lies_inside_the_target(target: str) -> None:
    assert "target has 8 layers" in error_of(engine(target, {"method": "early_exit", "exit_layer": 8, "num_speculative_tokens": 2})).message
    assert resolve_draft(target, {"method": "early_exit", "exit_layer": 7, "num_speculative_tokens": 2}).traits is not None


@pytest.mark.usefixtures("all_built")
def test_an_adapter_of_an_exit_layer_is_checked_like_a_head(tmp_path: Path, target: str) -> None:
    adapter = write_checkpoint(tmp_path / "adapter", {"architectures": ["EarlyExitAdapter"], "model_type": None})
    spec = {"method": "early_exit", "exit_layer": 4, "num_speculative_tokens": 2, "model": adapter}
    resolved = resolve_draft(target, spec)
    assert resolved.traits is not None
    assert (resolved.traits.taps, resolved.draft_model_path) == ((4,), adapter)
    assert "target has 8 layers" in error_of(engine(target, spec | {"exit_layer": 9})).message


@pytest.mark.usefixtures("all_built")
def test_a_draft_without_a_tokenizer_is_compared_by_size(tmp_path: Path, target: str) -> None:
    spec = {"method": "draft_model", "num_speculative_tokens": 3}
    assert resolve_draft(target, spec | {"model": write_checkpoint(tmp_path / "same")}).traits is not None
    other = write_checkpoint(tmp_path / "other", {"vocab_size": 9})
    assert "draft vocabulary 9 differs from target vocabulary 8" in error_of(engine(target, spec | {"model": other})).message


@pytest.mark.usefixtures("all_built")
def test_a_p_eagle_head_drafts_in_one_pass(tmp_path: Path, target: str) -> None:
    keys = {"speculators_model_type": "peagle", "transformer_layer_config": LLAMA, "mask_token_id": 3}
    keys["speculators_config"] = {"proposal_methods": [{"speculative_tokens": 4}]}
    head = write_checkpoint(tmp_path / "head", keys, base={})
    resolved = resolve_draft(target, {"model": head})
    assert resolved.traits is not None
    assert (resolved.traits.method, resolved.traits.max_nodes, resolved.traits.draft_slots) == ("eagle3", 4, 3)
    spec = {"method": "eagle3", "model": head, "parallel_drafting": False}
    assert "parallel_drafting is false" in error_of(engine(target, spec)).message


def test_drafts_fit_into_a_sequence(target: str) -> None:
    assert "at most 512 tokens" in error_of(engine(target, {"method": "ngram", "num_speculative_tokens": 512})).message


def test_a_lossy_rule_is_said_to_be_one(target: str, monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(speculative, "BUILT_RULES", frozenset({"standard", "typical"}))
    resolve(engine(target, {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "typical"}))
    assert "`typical` is lossy" in package_log.text


@pytest.mark.usefixtures("all_built")
def test_a_step_must_hold_the_lookahead(tmp_path: Path, target: str) -> None:
    head = write_checkpoint(tmp_path / "head", {"architectures": ["EagleLlamaForCausalLM"]})
    spec = {"method": "eagle", "model": head, "num_speculative_tokens": 4}
    assert "needs at least 5" in error_of(engine(target, spec, max_num_batched_tokens=4)).message
    assert resolve(engine(target, spec, max_num_batched_tokens=5)).num_lookahead_tokens == 4


@pytest.mark.usefixtures("all_built")
def test_a_hybrid_resolves_each_source_as_if_alone(tmp_path: Path, target: str) -> None:
    head = write_checkpoint(tmp_path / "head", {"architectures": ["LlamaForCausalLMEagle3"], "n_predict": 3})
    sources = [{"method": "ngram", "num_speculative_tokens": 8}, {"model": head}]
    resolved = resolve_draft(target, {"method": "hybrid", "sources": sources})
    assert resolved.traits is not None
    assert (resolved.traits.max_nodes, resolved.traits.lookahead, resolved.traits.taps) == (8, 3, (2, 4, 5))
    lookup, eagle = resolved.sources
    assert resolved.engine.speculative is not None
    assert resolved.engine.speculative.num_speculative_tokens == 8
    assert lookup.traits is not None
    assert eagle.traits is not None
    assert (lookup.traits.method, lookup.traits.max_nodes, lookup.draft_model_path) == ("ngram", 8, None)
    assert (eagle.traits.method, eagle.traits.max_nodes, eagle.draft_model_path) == ("eagle3", 3, head)
    assert eagle.draft_hf_config.hidden_size == 64
    assert eagle.engine.speculative is not None
    assert eagle.engine.speculative.method == "eagle3"


@pytest.mark.usefixtures("all_built")
def test_rates_of_a_hybrid_are_read_against_its_own_length(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "BUILT_RULES", frozenset({"synthetic"}))
    head = write_checkpoint(tmp_path / "head", {"architectures": ["EagleLlamaForCausalLM"], "n_predict": 2})
    spec = {"method": "hybrid", "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.0, 0.5, 0.5]}
    sources = [{"method": "ngram", "num_speculative_tokens": 3}, {"model": head}]
    resolved = resolve_draft(target, spec | {"sources": sources})
    rules = [source.engine.speculative.rejection_sample_method for source in resolved.sources if source.engine.speculative]
    assert rules == ["synthetic", "synthetic"]
    assert (
        "has 3 entries" in error_of(engine(target, spec | {"sources": [{**sources[0], "num_speculative_tokens": 4}, sources[1]]})).message
    )


def test_configuration_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import sys, specdec.config.resolve, specdec.config.report; assert not {'torch', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_tokenizer_in_its_own_directory_is_taken(tmp_path: Path, target: str) -> None:
    own = tmp_path / "tokenizer"
    own.mkdir()
    write_tokenizer(own)
    assert resolve(engine(target, tokenizer=str(own))).tokenizer_path == str(own)


def test_a_draft_is_not_served_as_a_target(tmp_path: Path) -> None:
    keys = {"speculators_model_type": "eagle3", "speculators_config": {"verifier": {"name_or_path": "org/base"}}}
    head = write_model(tmp_path / "head", keys)
    error = error_of(engine(head))
    assert "is a draft for method `eagle3`" in error.message
    assert "specdec serve org/base --speculative-config" in str(error.hint)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path, target: str) -> None:
    foreign = write_model(tmp_path / "foreign", tokens=(*TOKENS, "g", "h"))
    assert "10 tokens, but the model's vocabulary is 8" in error_of(engine(target, tokenizer=foreign)).message
