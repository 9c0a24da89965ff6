"""Settling the draft: which method its checkpoint is for, how many tokens it drafts, and whether it fits the target.

Owns: the order of those decisions. Must not know: the checks themselves (compatibility.py), nor device or dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from specdec.config import compatibility
from specdec.config.checkpoints import Target, draft_hf_config, token_ids
from specdec.config.inference import checkpoint_kind, mtp_depth, settle_method
from specdec.config.method_configs import DraftModelConfig, Eagle3Config, EagleConfig, MtpConfig
from specdec.config.speculative import (
    HybridConfig,
    SourceConfig,
    SpeculativeConfig,
    check_built,
    with_method,
    with_num_speculative_tokens,
    with_sources,
)
from specdec.config.token_map import read_token_map
from specdec.config.trained_heads import included_head
from specdec.errors import ConfigError
from specdec.models.source import has_tokenizer, locate_draft, read_json

_OWN_CHECKPOINT = frozenset({"draft_model", "eagle", "eagle3", "dflash", "medusa", "mlp_speculator"})
_IN_TARGET = frozenset({"mtp", "dspark"})  # without a model of their own they live in the target's checkpoint


@dataclass(frozen=True, slots=True)
class Draft:
    """The drafter as decided. keys: its config.json flattened, or empty. hf_config None: no checkpoint of its own.

    parts: the sources of a hybrid, each as if it ran alone. length_source: who set num_speculative_tokens.
    """

    config: SpeculativeConfig
    path: str | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    hf_config: Any = None
    length_source: Literal["user", "checkpoint", "derived"] = "user"
    parts: tuple[Draft, ...] = ()


def resolve_draft(config: SpeculativeConfig, target: Target, max_model_len: int) -> Draft:
    """Return the drafter that runs for what was asked; a hybrid settles each of its sources.

    Raises:
        ConfigError: the checkpoint is missing or broken, cannot be that method, or does not fit the target.
    """
    if isinstance(config, HybridConfig):
        draft = _resolve_hybrid(config, target, max_model_len)
    else:
        draft = _resolve_one(config, target, max_model_len)
    check_built(draft.config)  # the checkpoint may have changed the method
    return draft


def _resolve_hybrid(config: HybridConfig, target: Target, max_model_len: int) -> Draft:
    parts = [_resolve_one(source, target, max_model_len) for source in config.sources]
    drafts = config.num_speculative_tokens or max(part.config.num_speculative_tokens or 0 for part in parts)
    decided = with_num_speculative_tokens(with_sources(config, [cast("SourceConfig", part.config) for part in parts]), drafts)
    assert isinstance(decided, HybridConfig), type(decided)
    alone = tuple(replace(part, config=source) for part, source in zip(parts, decided.inherited_sources(), strict=True))
    return Draft(decided, length_source="user" if config.num_speculative_tokens else "derived", parts=alone)


def _resolve_one(config: SourceConfig, target: Target, max_model_len: int) -> Draft:
    """Settle method, length and fit of one draft source."""
    _check_exit_layer(config, target)
    if config.method not in _OWN_CHECKPOINT | _IN_TARGET and not (config.method == "early_exit" and config.model):
        return Draft(config)
    path, raw = _draft_checkpoint(config, target)
    config = _settle_draft_method(config, raw, in_target=path == target.files.model_path)
    keys = compatibility.flatten(raw)
    drafts, source = compatibility.settle_num_speculative_tokens(config.method, config.num_speculative_tokens, keys)
    config = with_num_speculative_tokens(config, drafts)
    compatibility.check_sizes(config.method, keys, target.keys)
    compatibility.check_options(config, keys)
    _check_token_map(config, target)
    if isinstance(config, DraftModelConfig) and not config.use_heterogeneous_vocab:
        _check_tokens(path, keys, target)
    limit = keys.get("max_position_embeddings")
    compatibility.check_draft_lengths(getattr(config, "max_model_len", None), draft_limit=limit, target_limit=max_model_len)
    return Draft(config, path, keys, draft_hf_config(path, keys), source)


def _check_token_map(config: SourceConfig, target: Target) -> None:
    if isinstance(config, EagleConfig | MtpConfig) and config.token_map is not None:
        read_token_map(config.token_map, int(target.keys["vocab_size"]))


def _check_tokens(path: str, keys: Mapping[str, Any], target: Target) -> None:
    """Compare vocabularies by token; by size where the draft has no tokenizer beside it."""
    sizes = {"draft_size": int(keys.get("vocab_size") or 0), "target_size": int(target.keys["vocab_size"])}
    if has_tokenizer(Path(path)):
        compatibility.check_vocabularies(token_ids(Path(path)), token_ids(Path(target.tokenizer_path)), **sizes)
    else:
        compatibility.check_vocabulary_sizes(**sizes)


def _draft_checkpoint(config: SourceConfig, target: Target) -> tuple[str, dict[str, Any]]:
    """Return directory and config.json of the drafter: its own, or the target's for layers that live there."""
    if config.model is None:
        if config.method == "mtp" and mtp_depth(target.raw) is None:
            hint = "name the draft checkpoint in `model`, or choose another method"
            raise ConfigError("speculative_config.method is `mtp`, but the target's checkpoint has no MTP layers", hint=hint)
        if config.method == "dspark" and not any(key.startswith("dspark_") for key in target.raw):
            hint = "name the draft checkpoint in `model`, or choose another method"
            raise ConfigError("speculative_config.method is `dspark`, but the target's checkpoint has no DSpark stages", hint=hint)
        return target.files.model_path, dict(target.raw)
    try:
        included = included_head(config.model)
        files = locate_draft(str(included or config.model), revision=getattr(config, "revision", None))
    except ConfigError as error:
        raise ConfigError(f"speculative_config.model: {error.message}", hint=error.hint) from None
    return files.model_path, read_json(Path(files.model_path) / "config.json")


def _settle_draft_method(config: SourceConfig, raw: Mapping[str, Any], *, in_target: bool) -> SourceConfig:
    if in_target or config.method == "early_exit":
        return config
    method = settle_method(config.method, is_inferred=config.is_method_inferred, kind=checkpoint_kind(raw))
    if method != config.method:
        config = with_method(config, method)
    if raw.get("speculators_model_type") != "peagle" or not isinstance(config, Eagle3Config) or config.parallel_drafting:
        return config
    if "parallel_drafting" in config.model_fields_set:
        raise ConfigError(
            "speculative_config.parallel_drafting is false, but a P-EAGLE head drafts in one pass", hint="drop parallel_drafting"
        )
    return config.model_copy(update={"parallel_drafting": True})


def _check_exit_layer(config: SourceConfig, target: Target) -> None:
    layer, layers = getattr(config, "exit_layer", None), target.keys.get("num_hidden_layers")
    if layer is not None and layers is not None and layer >= layers:
        message = f"speculative_config.exit_layer is {layer}, but the target has {layers} layers"
        raise ConfigError(message, hint=f"use a layer in 1..{layers - 1}")
