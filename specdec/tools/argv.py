"""What is done to `specdec serve`'s arguments before typer sees them: dotted keys, underscores, and vLLM flags we lack.

Owns: pure text work on argv. Must not know: what any option means afterwards (cli.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from specdec.errors import ConfigError

SPECULATIVE = "--speculative-config"
SPECULATIVE_SHORT = "-sc"

_ONE_DEVICE = "specdec runs on one device; drop the flag"
_ALWAYS_ON = "it is always on here; drop the flag"
_NOT_BUILT = "specdec has no such feature; drop the flag"
# Flags of vLLM that mean nothing here, or something else. Refused by name, so that a start script is never half obeyed.
REFUSED = {
    "--tensor-parallel-size": _ONE_DEVICE,
    "-tp": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "-pp": _ONE_DEVICE,
    "--data-parallel-size": _ONE_DEVICE,
    "-dp": _ONE_DEVICE,
    "--enable-expert-parallel": _ONE_DEVICE,
    "--distributed-executor-backend": _ONE_DEVICE,
    "--enable-chunked-prefill": _ALWAYS_ON,
    "--no-enable-chunked-prefill": "prompts are always read in chunks here; raise --max-num-batched-tokens to read them in one",
    "--disable-log-requests": "prompts and requests are never logged here; drop the flag",
    "--enable-log-requests": "prompts and requests are never logged here; use --per-request-spec-decode-metrics for what each one cost",
    "--quantization": _NOT_BUILT,
    "-q": _NOT_BUILT,
    "--kv-cache-dtype": "the KV cache has the dtype of the model; choose it by --dtype",
    "--enable-lora": _NOT_BUILT,
    "--lora-modules": _NOT_BUILT,
    "--cpu-offload-gb": _NOT_BUILT,
    "--swap-space": "preempted requests are recomputed, not swapped; drop the flag",
    "--load-format": "weights are read as safetensors or GGUF, by what the directory holds; drop the flag",
    "--download-dir": "set HF_HOME to move the hub's cache",
    "--hf-overrides": "edit config.json of a local copy of the model instead",
    "--generation-config": "sampling defaults are OpenAI's; send temperature and top_p with the request",
    "--override-generation-config": "sampling defaults are OpenAI's; send temperature and top_p with the request",
    "--compilation-config": _NOT_BUILT,
    "-O": _NOT_BUILT,
    "--num-speculative-tokens": "say --spec-tokens",
    "--speculative-model": "say --spec-model",
    "--speculative-method": "say --spec-method",
    "--num-lookahead-slots": "slots follow from the draft method; drop the flag",
}


def normalise(argv: Sequence[str]) -> list[str]:
    """Return argv with option names dashed and dotted speculative keys folded into one --speculative-config.

    Raises:
        ConfigError: a flag of vLLM that has no counterpart, a dotted key without value, or one key given twice.
    """
    rest: list[str] = []
    dotted: dict[str, Any] = {}
    queue = list(argv)
    while queue:
        token = queue.pop(0)
        if token == "--":
            return [*_fold(rest, dotted), token, *queue]
        name, equals, value = _split(token)
        _refuse(name)
        path = _dotted_path(name)
        if path is None:
            rest.append(name + equals + value)
            continue
        if not equals:
            if not queue:
                raise ConfigError(f"{name} has no value", hint=f"write {name} VALUE, for example {SPECULATIVE}.method ngram")
            value = queue.pop(0)
        _set(dotted, path, _parse(value), flag=name)
    return _fold(rest, dotted)


def _split(token: str) -> tuple[str, str, str]:
    """Return name, "=" or "", and value; underscores become dashes in the name of a long option only."""
    if not token.startswith("-") or token == "-":
        return token, "", ""
    name, equals, value = token.partition("=")
    if name.startswith("--"):
        head, dot, tail = name.partition(".")
        name = head.replace("_", "-") + dot + tail
    return name, equals, value


def _refuse(name: str) -> None:
    if name in REFUSED:
        raise ConfigError(f"{name} is a flag of vLLM that specdec does not have", hint=REFUSED[name])


def _dotted_path(name: str) -> list[str] | None:
    for option in (SPECULATIVE, SPECULATIVE_SHORT):
        if name.startswith(option + "."):
            path = name[len(option) + 1 :].replace("-", "_").split(".")
            if not all(path):
                raise ConfigError(f"{name} has an empty key", hint=f"write {SPECULATIVE}.KEY VALUE, for example {SPECULATIVE}.method ngram")
            return path
    return None


def _set(target: dict[str, Any], path: Sequence[str], value: Any, *, flag: str) -> None:
    for key in path[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{flag} goes below `{key}`, which already has a plain value", hint="give the key once")
    if path[-1] in target:
        raise ConfigError(f"{flag} is given twice", hint="give the key once")
    target[path[-1]] = value


def _parse(text: str) -> Any:
    """Return text as JSON when it is JSON (numbers, true, null, lists), else as a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _fold(argv: list[str], dotted: dict[str, Any]) -> list[str]:
    """Merge dotted keys into the JSON of --speculative-config when there is one. Bad JSON is left for its own error."""
    if not dotted:
        return argv
    for index, token in enumerate(argv):
        name, equals, value = token.partition("=")
        if name not in (SPECULATIVE, SPECULATIVE_SHORT):
            continue
        if not equals and index + 1 == len(argv):
            return argv
        base = _parse(value if equals else argv[index + 1])
        if not isinstance(base, dict):
            return argv
        clash = sorted({str(key).replace("-", "_") for key in base} & set(dotted))
        if clash:
            raise ConfigError(
                f"{SPECULATIVE}.{clash[0]} and the key `{clash[0]}` of {SPECULATIVE} are both given", hint="give the key once"
            )
        merged = json.dumps({**base, **dotted})
        return [*argv[:index], SPECULATIVE, merged, *argv[index + (1 if equals else 2) :]]
    return [*argv, SPECULATIVE, json.dumps(dotted)]
