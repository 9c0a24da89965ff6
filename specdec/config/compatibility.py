"""Whether a draft checkpoint fits its target, judged by their configs: sizes, vocabularies, trained depth.

Owns: the checks and the default of num_speculative_tokens. Must not know: files (resolve.py reads them). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from specdec.config.fields import refuse
from specdec.config.inference import SPECULATORS_METHODS, mtp_depth
from specdec.config.method_configs import DflashConfig, DraftModelConfig, DsparkConfig, Eagle3Config, MtpConfig
from specdec.config.speculative import SpeculativeConfig
from specdec.errors import ConfigError
from specdec.logging import get_logger

logger = get_logger(__name__)

MASK_TOKEN_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
NO_HEAD_STATES = frozenset({"draft_model"})  # methods that read nothing of the target's hidden width


def flatten(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a draft's config.json in one level; a speculators config keeps its decoder in a part of its own.

    Raises:
        ConfigError: a speculators config without transformer_layer_config or proposal methods.
    """
    if "speculators_model_type" not in raw:
        return {**raw, **{key: value for key, value in (raw.get("text_config") or {}).items() if key not in raw}}
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ConfigError("draft config.json is a speculators config without transformer_layer_config", hint="export the draft again")
    flat = {**layer, **{key: value for key, value in raw.items() if key != "transformer_layer_config"}}
    family = raw["speculators_model_type"]
    if family in ("dflash", "dflash2", "dspark") and not raw.get("aux_hidden_state_layer_ids"):
        raise ConfigError(f"draft config.json ({family}) has no aux_hidden_state_layer_ids", hint="export the draft again")
    return flat


def trained_depth(method: str, keys: Mapping[str, Any]) -> tuple[int | None, str]:
    """Return how many drafts the checkpoint was made for and the key that says so; None where nothing does."""
    if proposals := (keys.get("speculators_config") or {}).get("proposal_methods"):
        tokens = proposals[0].get("speculative_tokens")
        if not isinstance(tokens, int):
            raise ConfigError("draft config.json: the first of proposal_methods has no speculative_tokens", hint="export the draft again")
        return tokens, "speculative_tokens"
    if keys.get("speculators_model_type") in SPECULATORS_METHODS:
        raise ConfigError("draft config.json has no proposal_methods in speculators_config", hint="export the draft again")
    if method in ("dspark", "dflash"):
        for key in ("block_size", "dspark_block_size"):
            if isinstance(keys.get(key), int):
                return keys[key] - (method == "dflash"), key  # a dflash block starts with the anchor
        return None, ""
    if method == "medusa":
        key = "num_heads" if "num_heads" in keys else "medusa_num_heads"
        return keys.get(key), key
    if method == "mtp":
        return mtp_depth(keys), "n_predict"
    return keys.get("n_predict"), "n_predict"


def settle_num_speculative_tokens(method: str, asked: int | None, keys: Mapping[str, Any]) -> tuple[int, Literal["user", "checkpoint"]]:
    """Return the number of drafts and where it came from: user or checkpoint.

    Raises:
        ConfigError: none is known, or more are asked than the checkpoint can draft.
    """
    depth, key = trained_depth(method, keys)
    if asked is None and depth is None:
        hint = 'the draft checkpoint names none: add "num_speculative_tokens"'
        refuse("num_speculative_tokens", f"is missing, but method `{method}` needs it", hint)
    if asked is None:
        return int(depth or 1), "checkpoint"
    _check_depth(method, asked, depth, key, keys)
    return asked, "user"


def _check_depth(method: str, asked: int, depth: int | None, key: str, keys: Mapping[str, Any]) -> None:
    name = "num_speculative_tokens"
    if "ParseAuxMTPModel" in (keys.get("architectures") or ()) and asked != 1:
        refuse(name, f"is {asked}, but this checkpoint has one trained step, so it must be 1", f"use 1, or leave {name} out")
    if depth is None or asked <= depth or key == "medusa_num_heads":  # the authors' configs name too few: the weights are counted
        return
    if method == "mtp" and asked % depth == 0:
        logger.warning(
            "num_speculative_tokens %d exceeds the %d trained MTP layers: the last drafts again and again, and is accepted less",
            asked,
            depth,
        )
        return
    if method in ("mtp", "medusa", "mlp_speculator", "dflash", "dspark"):
        more = f" or a multiple of {depth}" if method == "mtp" else ""
        refuse(name, f"is {asked}, but the draft checkpoint has {key} {depth}, so it must be at most {depth}{more}", f"use {depth}")


def check_sizes(method: str, draft: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Compare hidden width and vocabulary of a drafter that reads the target's hidden states.

    Raises:
        ConfigError: names both numbers.
    """
    if method in NO_HEAD_STATES:
        return
    hint = "choose a draft trained for this target, or use method `ngram`, which needs none"
    width = draft.get("target_hidden_size") or draft.get("hidden_size")
    if width is not None and target.get("hidden_size") is not None and width != target["hidden_size"]:
        raise ConfigError(f"draft hidden size {width} differs from target hidden size {target['hidden_size']}", hint=hint)
    vocabulary = draft.get("vocab_size")
    if vocabulary is not None and vocabulary != target["vocab_size"]:
        raise ConfigError(f"draft vocabulary {vocabulary} differs from target vocabulary {target['vocab_size']}", hint=hint)
    reduced = draft.get("draft_vocab_size")
    if reduced is not None and reduced > target["vocab_size"]:
        raise ConfigError(f"draft_vocab_size {reduced} of the draft exceeds the target vocabulary {target['vocab_size']}", hint=hint)


def check_options(config: SpeculativeConfig, keys: Mapping[str, Any]) -> None:
    """Check the keys that only some checkpoints of a method can honour.

    Raises:
        ConfigError: names the key, or the checkpoint's contradiction.
    """
    match config:
        case MtpConfig():
            _check_mtp(keys)
        case DflashConfig():
            _check_dflash(config.xpress_topc, keys)
        case DsparkConfig():
            _check_dspark(config.dspark_draft_topk, keys)
        case DraftModelConfig() | Eagle3Config() if config.parallel_drafting and not has_mask_token(keys):
            hint = f"the checkpoint needs one of {', '.join(MASK_TOKEN_KEYS)}, dflash_config.mask_token_id"
            refuse("parallel_drafting", "is true, but the draft checkpoint names no mask token to draft with", hint)


def has_mask_token(keys: Mapping[str, Any]) -> bool:
    """True when a checkpoint names the token that stands for a position to be drafted."""
    return any(keys.get(key) is not None for key in MASK_TOKEN_KEYS) or (keys.get("dflash_config") or {}).get("mask_token_id") is not None


def _check_mtp(keys: Mapping[str, Any]) -> None:
    if keys.get("model_type") == "deepseek_v41":
        refuse("method", "is `mtp`, but DeepSeek V4.1 checkpoints carry DSpark stages instead", 'set "method": "dspark"')
    kinds, depth = keys.get("mtp_layer_types"), mtp_depth(keys)
    if kinds is not None and len(kinds) != depth:
        raise ConfigError(
            f"draft config.json: mtp_layer_types has {len(kinds)} entries for {depth} MTP layers", hint="export the checkpoint again"
        )


def _check_dflash(topc: int | None, keys: Mapping[str, Any]) -> None:
    if keys.get("sample_from_anchor") or (keys.get("dflash_config") or {}).get("sample_from_anchor"):
        hint = "a block that is sampled from its anchor is a DSpark head"
        raise ConfigError("draft config.json: sample_from_anchor is true, but DFlash starts its block with the anchor", hint=hint)
    if topc is None:
        return
    architecture, limit = _architecture(keys), _draft_vocabulary(keys)
    if "XPress" not in architecture:
        refuse("xpress_topc", f"is {topc}, but only XPress drafts use it, and this is {architecture}", "drop it")
    if topc > limit:
        refuse("xpress_topc", f"is {topc}, but it must be between 0 and the draft vocabulary {limit}")


def _check_dspark(topk: int | None, keys: Mapping[str, Any]) -> None:
    if topk is None:
        return
    architecture, limit = _architecture(keys), _draft_vocabulary(keys)
    if architecture not in ("Qwen3DSparkModel", "Qwen3OmniDSparkModel", "DSparkDraftModel"):
        refuse("dspark_draft_topk", f"is {topk}, but {architecture} scores its whole vocabulary", "drop it")
    if topk > limit:
        refuse("dspark_draft_topk", f"is {topk}, but it must be between 1 and the draft vocabulary {limit}")


def _architecture(keys: Mapping[str, Any]) -> str:
    return str((keys.get("architectures") or ["unknown"])[0])


def _draft_vocabulary(keys: Mapping[str, Any]) -> int:
    return int(keys.get("draft_vocab_size") or keys.get("vocab_size") or 0)


def check_vocabularies(draft_tokens: Mapping[str, int], target_tokens: Mapping[str, int], *, draft_size: int, target_size: int) -> None:
    """Compare the tokens of a draft model with the target's. Sizes in rows of the embeddings; padding rows may differ.

    Raises:
        ConfigError: names both sizes and the first token that differs.
    """
    for token, index in sorted(target_tokens.items(), key=lambda item: item[1]):
        if draft_tokens.get(token) != index:
            found = f"id {draft_tokens[token]}" if token in draft_tokens else "missing"
            message = (
                f"draft vocabulary {draft_size} does not match target vocabulary {target_size}: "
                f"token {token!r} is id {index} in the target and {found} in the draft"
            )
            raise ConfigError(message, hint="choose a draft with the target's tokenizer, or use method `ngram`, which needs none")
    if draft_size != target_size:
        logger.info("draft and target have the same tokens; rows %d and %d differ in padding only", draft_size, target_size)


def check_vocabulary_sizes(*, draft_size: int, target_size: int) -> None:
    """Compare vocabularies by size, for a draft without a tokenizer.

    Raises:
        ConfigError: names both sizes.
    """
    if draft_size != target_size:
        hint = "put the draft's tokenizer.json beside its weights if only padding rows differ"
        raise ConfigError(f"draft vocabulary {draft_size} differs from target vocabulary {target_size}", hint=hint)


def check_draft_lengths(asked: int | None, *, draft_limit: int | None, target_limit: int) -> None:
    """Check the drafter's own length limit, in tokens, against both models.

    Raises:
        ConfigError: it exceeds one of them.
    """
    if asked is None:
        return
    if draft_limit is not None and asked > draft_limit:
        refuse("max_model_len", f"is {asked}, but the draft reads at most {draft_limit} tokens", f"use at most {draft_limit}, or drop it")
    if asked > target_limit:
        refuse("max_model_len", f"is {asked}, but the target's max_model_len is {target_limit}", f"use at most {target_limit}, or drop it")
