"""What the checks read of checkpoints: configuration objects, plain keys, tokens and end tokens.

Owns: reading config.json, generation_config.json and tokenizer files. Must not know: what was asked, nor weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.config.engine import ModelConfig
from specdec.config.inference import checkpoint_kind
from specdec.errors import ConfigError
from specdec.models.source import TargetFiles, locate_target, locate_tokenizer, read_json

_CHAT_END = "<|im_end|>"  # what the embedded model says at the end of a turn
_SAME_LAYERS = {"mimo": "qwen2"}  # types that transformers does not know, whose layers are those of one that it does
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class Target:
    """What the checks read of the target: its files, its configuration object, and the text part of that as a mapping."""

    files: TargetFiles
    tokenizer_path: str
    hf_config: Any
    keys: Mapping[str, Any]
    raw: Mapping[str, Any]


def read_target(model: ModelConfig) -> Target:
    """Return the target's files and configuration.

    Raises:
        ConfigError: files are missing or broken, or it is no language model.
    """
    files = locate_target(model.model, revision=model.revision)
    raw = read_json(Path(files.model_path) / "config.json")
    _refuse_draft_as_target(model.model, raw)
    _check_sizes(files.model_path, raw)
    tokenizer_path = locate_tokenizer(model.tokenizer or files.tokenizer_path)
    hf_config = auto_config(files.model_path, trust_remote_code=model.trust_remote_code)
    keys = hf_config.get_text_config().to_dict()
    if not keys.get("vocab_size"):
        raise ConfigError(f"model type {keys.get('model_type')!r} has no vocab_size", hint="serve a causal language model")
    _check_tokenizer_size(tokenizer_path, int(keys["vocab_size"]))
    return Target(files, tokenizer_path, hf_config, keys, raw)


def _check_sizes(path: str, raw: Mapping[str, Any]) -> None:
    """Refuse sizes no model has, by their names: later they would be a division by zero, or missing tensors."""
    text = raw.get("text_config")
    for keys in (raw, text if isinstance(text, dict) else {}):
        for name in _SIZES:
            size = keys.get(name)
            if size is not None and not isinstance(size, list) and (type(size) is not int or size < 1):  # lists: one for each layer
                raise _damaged(path, f"{name} is {size!r}, but it must be a whole number of at least 1")
        heads, kv_heads = keys.get("num_attention_heads"), keys.get("num_key_value_heads")
        if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
            raise _damaged(path, f"num_attention_heads is {heads}, but it must be a multiple of num_key_value_heads, {kv_heads}")


def _damaged(path: str, fault: str) -> ConfigError:
    return ConfigError(f"{path}/config.json: {fault}", hint="the file is damaged or was edited: fetch or export the checkpoint again")


def _refuse_draft_as_target(model: str, raw: Mapping[str, Any]) -> None:
    """A draft head is not served by itself: say how it is used, with its own target where it names one."""
    method = checkpoint_kind(raw).method
    if method is None or method == "mtp":
        return
    target = ((raw.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path") or "TARGET"
    spec = f'{{"method": "{method}", "model": "{model}"}}'
    raise ConfigError(
        f"model {model!r} is a draft for method `{method}`, not a model to serve",
        hint=f"specdec serve {target} --speculative-config '{spec}'",
    )


def _check_tokenizer_size(tokenizer: str, vocab_size: int) -> None:
    """Refuse a tokenizer whose own vocabulary is larger than the model's. A few added tokens past the end are common and unused."""
    path = Path(tokenizer) / "tokenizer.json"
    if not path.is_file():
        return
    size = max(_base_vocabulary(read_json(path)).values(), default=-1) + 1
    if size > vocab_size:
        hint = "pass --tokenizer with the model's own tokenizer"
        raise ConfigError(f"tokenizer {tokenizer} has {size} tokens, but the model's vocabulary is {vocab_size}", hint=hint)


def auto_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """Return transformers' configuration object of a directory.

    Raises:
        ConfigError: config.json is missing or cannot be read as any model's.
    """
    import transformers

    raw = read_json(Path(path) / "config.json")
    try:
        if raw.get("model_type") in _SAME_LAYERS:
            return transformers.AutoConfig.for_model(_SAME_LAYERS[raw["model_type"]], **_without_types(raw))
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # unknown model types, bad values and missing code end here by many classes
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{path}/config.json cannot be read: {first}", hint="check that transformers knows this model type") from None


def draft_hf_config(path: str, keys: Mapping[str, Any]) -> Any:
    """Return a configuration object for a drafter; types that transformers does not know become a plain one with the same keys."""
    import transformers

    kept = _without_types(keys)
    try:
        return transformers.AutoConfig.for_model(_SAME_LAYERS.get(keys["model_type"], keys["model_type"]), **kept)
    except (KeyError, ValueError, TypeError):
        pass
    try:
        plain = transformers.PretrainedConfig()
        for key, value in kept.items():
            setattr(plain, key, value)
    except Exception as error:
        raise ConfigError(f"{path}/config.json cannot be read: {error}", hint="export the draft again") from None
    return plain


def _without_types(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in ("model_type", "transformers_version", "auto_map")}


def eos_token_ids(target: Target) -> tuple[int, ...]:
    """Return every id that ends an answer, ascending: generation config, model config, tokenizer, and the embedded model's turn end."""
    path, tokenizer = Path(target.files.model_path), Path(target.tokenizer_path)
    found: set[int] = set()
    generation = read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    for value in (generation.get("eos_token_id"), target.keys.get("eos_token_id")):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    ids = token_ids(tokenizer)
    names = [_eos_token(tokenizer)] + ([_CHAT_END] if target.files.kind == "embedded" else [])
    found.update(ids[name] for name in names if name in ids)
    vocab_size = int(target.keys["vocab_size"])
    if outside := sorted(index for index in found if not 0 <= index < vocab_size):
        raise ConfigError(
            f"eos token ids {outside} are outside the model's vocabulary of {vocab_size}", hint="pass the model's own --tokenizer"
        )
    return tuple(sorted(found))


def _eos_token(tokenizer: Path) -> str | None:
    path = tokenizer / "tokenizer_config.json"
    token = read_json(path).get("eos_token") if path.is_file() else None
    return token.get("content") if isinstance(token, dict) else token


def token_ids(tokenizer: Path) -> dict[str, int]:
    """Return token -> id of a tokenizer, added tokens included; through transformers where there is no tokenizer.json."""
    path = tokenizer / "tokenizer.json"
    if path.is_file():
        content = read_json(path)
        added = {entry["content"]: entry["id"] for entry in content.get("added_tokens") or ()}
        return {**_base_vocabulary(content), **added}
    import transformers

    try:
        return dict(transformers.AutoTokenizer.from_pretrained(str(tokenizer)).get_vocab())
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"tokenizer {tokenizer} cannot be read: {first}", hint="pass --tokenizer with the model's own tokenizer"
        ) from None


def _base_vocabulary(content: Mapping[str, Any]) -> dict[str, int]:
    """Return token -> id of the `model` part of a tokenizer.json; unigram models list (token, score) pairs."""
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    return {entry[0]: index for index, entry in enumerate(vocabulary)} if isinstance(vocabulary, list) else vocabulary
