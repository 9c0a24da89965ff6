"""Text or mapping -> one flat mapping with known keys: the pure half of reading --speculative-config.

Owns: JSON, spelling of keys, short flags, keys refused by name, and turning pydantic's complaints into ours.
Must not know: checkpoints. Read next: speculative.py.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

from pydantic import ValidationError

from specdec.config.fields import SpeculativeBase, refuse
from specdec.config.inference import MTP_ALIASES, is_import_path, method_from_name
from specdec.errors import ConfigError
from specdec.logging import get_logger

logger = get_logger(__name__)

_ONE_DEVICE = "one device serves target and draft"
REFUSED_KEYS: dict[str, tuple[tuple[Any, ...], str, str]] = {  # key: (values that ask for nothing, reason, way out)
    "tensor_parallel_size": ((None,), "is not a key of the speculative config", "use draft_tensor_parallel_size, which must be 1 here"),
    "moe_backend": ((None, "auto"), f"is not supported: {_ONE_DEVICE} with one MoE path", "leave it out"),
    "attention_backend": ((None, "auto"), "is not supported: the draft uses the target's attention kernels", "leave it out"),
    "kv_cache_dtype": ((None, "auto"), "is not supported: the draft's KV cache has the target's dtype", "leave it out"),
    "code_revision": (
        (None,),
        "is not supported: draft checkpoints are read without running their code",
        "use revision",
    ),
    "disable_padded_drafter_batch": ((None, False), "is not supported: drafters here never see rejected rows as padding", "leave it out"),
    "disable_eagle_block_drop": (
        (None, False),
        "is not supported: the prefix cache keeps draft and target blocks in step",
        "leave it out",
    ),
    "disable_lookahead_block_hashes": ((None, False), "is not supported: there is one way of hashing blocks", "leave it out"),
    "draft_lm_head_quantization": ((None,), "is not supported: draft and target share one unquantized head", "leave it out"),
    "use_local_argmax_reduction": ((None, False), f"is not supported: {_ONE_DEVICE}, so no vocabulary is split", "leave it out"),
    "draft_load_config": ((None,), "is not supported: drafts are read from safetensors", "leave it out"),
    "target_model_config": ((None,), "is filled by the engine", "leave it out"),
    "target_parallel_config": ((None,), "is filled by the engine", "leave it out"),
    "draft_parallel_config": ((None,), "is filled by the engine", "leave it out"),
}
FLAGS = {
    "method": "--spec-method",
    "model": "--spec-model",
    "num_speculative_tokens": "--spec-tokens",
    "token_map": "--speculative-token-map",
}
_PREFIX = "speculative_config."
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
Owners: TypeAlias = Mapping[str, tuple[str, ...]]


def read_mapping(raw: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the object that the user wrote, dashes in its keys turned into underscores.

    Raises:
        ConfigError: not JSON (with line and column), not an object, or a key given twice.
    """
    if isinstance(raw, str):
        raw = _load_json(raw)
    if not isinstance(raw, Mapping):
        kind = type(raw).__name__
        raise ConfigError(
            f"speculative_config is a {kind}, but it must be a JSON object",
            hint=f"for example {_EXAMPLE}",
        )
    result: dict[str, Any] = {}
    for key, value in raw.items():
        if not isinstance(key, str):
            raise ConfigError(f"speculative_config has the key {key!r}, but keys must be strings")
        name = key.replace("-", "_")
        if name in result:
            raise ConfigError(f"speculative_config names {name} twice", hint="keep one of the two")
        result[name] = value
    return result


def merge_flags(data: dict[str, Any], flags: Mapping[str, Any]) -> None:
    """Add the short flags, by their keys in FLAGS, to the mapping, in place. None: not given.

    Raises:
        ConfigError: a flag and its key, in either spelling, are both given.
    """
    for key, value in flags.items():
        if value is None:
            continue
        if data.get(key) is not None:
            raise ConfigError(f"{FLAGS[key]} and --speculative-config['{key}'] are mutually exclusive", hint="give it once")
        data[key] = value


def drop_refused_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping without vLLM's keys that have no meaning here.

    Raises:
        ConfigError: one of them asks for something.
    """
    kept = dict(data)
    for key, (neutral, reason, hint) in REFUSED_KEYS.items():
        if key in kept and not any(kept[key] is value or (isinstance(value, str) and kept[key] == value) for value in neutral):
            refuse(key, reason, hint)
        kept.pop(key, None)
    return kept


def name_method(data: Mapping[str, Any], known: Iterable[str]) -> tuple[str, bool]:
    """Return the method and whether it had to be guessed from the model's name.

    Raises:
        ConfigError: an unknown method, or neither method nor model.
    """
    method, model, known = data.get("method"), data.get("model"), tuple(known)
    if method is None and model is None:
        refuse("method", "is missing, and there is no model to infer it from", f"choose one of {', '.join(known)}")
    if method is None:
        return _method_of_model(model, known)
    if not isinstance(method, str):
        refuse("method", f"is {method!r}, but it must be a string", f"choose one of {', '.join(known)}")
    if method in MTP_ALIASES:
        logger.warning("speculative_config.method `%s` is deprecated: it is now `mtp`", method)
        return "mtp", False
    if method not in known:
        hint = near_miss(method, known) or f"choose one of {', '.join(known)}"
        refuse("method", f"is {method!r}, which is not a draft method", hint)
    return method, False


def near_miss(word: str, known: Iterable[str]) -> str | None:
    """Return `did you mean ...?` for a typo, or None."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else None


def validate(model: type[SpeculativeBase], data: Mapping[str, Any], owners: Owners) -> SpeculativeBase:
    """Build one method's config. owners: key -> the methods that have it, for keys given to the wrong one.

    Raises:
        ConfigError: the first complaint, by field, value, rule and way out.
    """
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        _explain(error, model, data, owners)


def _load_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for position, (key, _) in enumerate(pairs):
            if any(key == earlier for earlier, _ in pairs[:position]):
                raise ConfigError(f"speculative_config names {key} twice", hint="keep one of the two")
        return dict(pairs)

    def constant(name: str) -> NoReturn:
        raise ConfigError(f"speculative_config holds {name}, which is not JSON", hint="use a finite number")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        around = text[max(error.pos - 12, 0) : error.pos + 12]
        hint = f"write it in single quotes for the shell: '{_EXAMPLE}'"
        raise ConfigError(f"speculative_config is not valid JSON: {error.msg.lower()} at {where}, near {around!r}", hint=hint) from None


def _method_of_model(model: Any, known: tuple[str, ...]) -> tuple[str, bool]:
    if not isinstance(model, str) or not model:
        refuse("model", f"is {model!r}, but it must be a non-empty string")
    if is_import_path(model):
        return "custom_class", False
    if model in ("ngram", "[ngram]"):
        return "ngram", False
    if model in known:
        refuse("model", f"is {model!r}, which is a method", f'write "method": "{model}"')
    return method_from_name(model) or "draft_model", True


def _explain(error: ValidationError, model: type[SpeculativeBase], data: Mapping[str, Any], owners: Owners) -> NoReturn:
    complaints = error.errors(include_url=False)
    complaint = next((one for one in complaints if one["type"] == "extra_forbidden"), complaints[0])  # a typo explains a missing key
    path = _dotted(complaint["loc"])
    method = data.get("method")
    if complaint["type"] == "extra_forbidden":
        key = str(complaint["loc"][-1])
        if len(complaint["loc"]) == 1 and (methods := owners.get(key)):
            names = ", ".join(f"`{name}`" for name in methods)
            raise ConfigError(f"{_PREFIX}{path} does not apply to method `{method}`: it belongs to {names}", hint="drop it")
        hint = near_miss(key, model.model_fields) or f"method `{method}` knows {', '.join(sorted(model.model_fields))}"
        raise ConfigError(f"unknown field `{path}` for method `{method}`", hint=hint)
    if complaint["type"] == "missing" and isinstance(complaint["loc"][-1], int):
        path = _dotted(complaint["loc"][:-1])
        raise ConfigError(f"{_PREFIX}{path} is {list(complaint['input'])}, but it must have {complaint['loc'][-1] + 1} items or more")
    if complaint["type"] == "missing":
        raise ConfigError(f"{_PREFIX}{path} is missing, but method `{method}` needs it", hint=f'add "{complaint["loc"][-1]}"')
    raise ConfigError(f"{_PREFIX}{path} is {complaint['input']!r}, but {_rule(complaint)}", hint=_literal_hint(complaint))


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


_RULES = {
    "greater_than_equal": "it must be at least {ge}",
    "less_than_equal": "it must be at most {le}",
    "literal_error": "it must be one of {expected}",
    "int_type": "it must be an integer",
    "int_parsing": "it must be an integer",
    "int_from_float": "it must be an integer",
    "bool_type": "it must be true or false",
    "string_type": "it must be a string",
    "string_too_short": "it must not be empty",
    "float_type": "it must be a number",
    "finite_number": "it must be a finite number",
    "tuple_type": "it must be a list",
    "too_short": "it must not be empty",
    "too_long": "it must have {max_length} items",
    "model_type": "it must be an object",
    "model_attributes_type": "it must be an object",
}


def _rule(complaint: Mapping[str, Any]) -> str:
    template = _RULES.get(complaint["type"])
    if template is None:
        return str(complaint["msg"])[0].lower() + str(complaint["msg"])[1:]
    return template.format(**complaint.get("ctx", {}))


def _literal_hint(complaint: Mapping[str, Any]) -> str | None:
    if complaint["type"] != "literal_error":
        return None
    expected = str(complaint["ctx"]["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
    return near_miss(str(complaint["input"]), expected)
