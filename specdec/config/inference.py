"""Which draft method is meant: from the name of a model, then from its checkpoint, which knows better.

Owns: name hints, deprecated aliases, architecture table, and who wins. Must not know: files (resolve.py reads them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.errors import ConfigError
from specdec.logging import get_logger

logger = get_logger(__name__)

# fmt: off
MTP_ALIASES = frozenset((
    "deepseek_mtp", "dots3_note_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "glm_ocr_mtp", "ernie_mtp",
    "nemotron_h_mtp", "exaone_moe_mtp", "exaone4_5_mtp", "qwen3_next_mtp", "qwen4_exp_mtp", "qwen3_5_mtp", "longcat_flash_mtp",
    "bailing_hybrid_v3_mtp", "minimax_m3_mtp", "bailing_hybrid_mtp", "kimi_k3_mtp", "pangu_ultra_moe_mtp", "step3p5_mtp", "step5_mtp",
    "hy_v3_mtp", "hy_v4_mtp", "gemma4_mtp", "inkling_mtp", "glm5_next_mtp",
))
# fmt: on
NAME_HINTS = (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark"))
SPECULATORS_METHODS = {"eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dflash2": "dflash", "dspark": "dspark", "mtp": "mtp"}
_ARCHITECTURE_MARKS = (  # first hit wins, on the lower-cased architecture
    ("dspark", "dspark"),
    ("dflash", "dflash"),
    ("lilicorr", "dflash"),
    ("xpress", "dflash"),
    ("museglimmerassistant", "dflash"),
    ("eagle3", "eagle3"),
    ("peagle", "eagle3"),
    ("eagle", "eagle"),
    ("medusa", "medusa"),
    ("mlpspeculator", "mlp_speculator"),
    ("mtp", "mtp"),
)
_MODEL_TYPES = {"medusa": "medusa", "mlp_speculator": "mlp_speculator", "gemma4_assistant": "mtp", "gemma4_unified_assistant": "mtp"}
_MTP_DEPTH_KEYS = ("n_predict", "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")
_MTP_BY_TYPE = {"longcat_flash": 1, "step3p5": 1, "step3p7": 1, "step5": 1, "gemma4_assistant": 1, "gemma4_unified_assistant": 1}


@dataclass(frozen=True, slots=True)
class CheckpointKind:
    """What a draft checkpoint can be. method: the only sensible reading, or None for an ordinary language model.

    allowed: methods that may be asked for explicitly. why: the evidence, for messages.
    """

    method: str | None
    allowed: frozenset[str]
    why: str


def is_import_path(model: str) -> bool:
    """True for `package.module.Class`: no slash, no URL, at least two identifiers joined by dots, and not a weight file."""
    parts = model.split(".")
    return "/" not in model and len(parts) >= 2 and all(part.isidentifier() for part in parts) and parts[-1] not in ("gguf", "safetensors")


def method_from_name(model: str) -> str | None:
    """Return the method that the last part of a path or hub id hints at, or None. Parent directories do not count."""
    name = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return next((method for mark, method in NAME_HINTS if mark in name), None)


def mtp_depth(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens the MTP layers of a checkpoint were trained to predict, or None when it has none."""
    for part in (config, config.get("text_config") or {}, config.get("mtp_config") or {}):
        for key in _MTP_DEPTH_KEYS:
            if isinstance(part.get(key), int) and part[key] > 0:
                return int(part[key])
    return _MTP_BY_TYPE.get(str(config.get("model_type")))


def checkpoint_kind(config: Mapping[str, Any]) -> CheckpointKind:
    """Read what a checkpoint is from its config.json.

    Raises:
        ConfigError: a speculators checkpoint of a type that is not known.
    """
    if (family := config.get("speculators_model_type")) is not None:
        if family not in SPECULATORS_METHODS:
            known = ", ".join(SPECULATORS_METHODS)
            raise ConfigError(
                f"draft checkpoint has speculators_model_type {family!r}, but the known ones are {known}", hint="choose another draft"
            )
        return _only(SPECULATORS_METHODS[family], f"speculators_model_type {family}")
    model_type = str(config.get("model_type"))
    if model_type in _MODEL_TYPES:
        return _only(_MODEL_TYPES[model_type], f"model_type {model_type}")
    architecture = str((config.get("architectures") or [""])[0])
    for mark, method in _ARCHITECTURE_MARKS:
        if mark in architecture.lower():
            return _only(method, f"architecture {architecture}")
    if "medusa_num_heads" in config:
        return _only("medusa", "medusa_num_heads")
    return _ordinary(config, architecture or model_type)


def settle_method(asked: str, *, is_inferred: bool, kind: CheckpointKind) -> str:
    """Return the method to run: the checkpoint wins over a guess with a warning, and an impossible explicit method is refused.

    Raises:
        ConfigError: the user named a method that the checkpoint cannot be.
    """
    if asked in kind.allowed:
        return asked
    best = kind.method or "draft_model"
    if not is_inferred:
        hint = f'set "method": "{best}", or choose another draft checkpoint'
        raise ConfigError(f"speculative_config.method is `{asked}`, but the draft checkpoint is for `{best}` ({kind.why})", hint=hint)
    logger.warning("draft method `%s` was guessed, the checkpoint says `%s` (%s): using `%s`", asked, best, kind.why, best)
    return best


def _only(method: str, why: str) -> CheckpointKind:
    return CheckpointKind(method, frozenset({method}), why)


def _ordinary(config: Mapping[str, Any], architecture: str) -> CheckpointKind:
    """A causal language model: a draft model, or an EAGLE head, whose published configs look the same."""
    allowed = {"draft_model", "eagle", "eagle3"}
    if mtp_depth(config) is not None:
        allowed.add("mtp")
    if "dflash_config" in config:
        return _only("dflash", "dflash_config")
    if any(key.startswith("dspark_") for key in config):
        allowed.add("dspark")
    if "draft_vocab_size" in config:
        return CheckpointKind("eagle3", frozenset({"eagle3"}), "draft_vocab_size")
    return CheckpointKind(None, frozenset(allowed), f"architecture {architecture}")
