"""Options of `specdec serve` from a YAML file: long option names as keys; the command line wins over the file.

Owns: reading and checking the file. Must not know: what the options mean.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError


def read_options(path: str, known: Mapping[str, str], *, repeated: Collection[str] = ()) -> dict[str, Any]:
    """Return parameter name -> value. `known` maps each long option without dashes ("max-model-len") to its parameter;
    `repeated` are the parameters that take a list, for which one value is a list of one.

    Raises:
        ConfigError: no such file, not YAML, not a mapping, or a key that is no option.
    """
    import yaml

    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}", hint="give the path of a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--config {path} is not YAML: {' '.join(str(error).split())}", hint="write one `option: value` a line"
        ) from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path} holds a {type(loaded).__name__}, not options", hint="write one `option: value` a line")
    options = {_parameter(str(key), known, path): _plain(value) for key, value in loaded.items()}
    return {name: [value] if name in repeated and not isinstance(value, list) else value for name, value in options.items()}


def _parameter(key: str, known: Mapping[str, str], path: str) -> str:
    name = key.replace("_", "-").lstrip("-")
    if name not in known:
        near = get_close_matches(name, known, n=1)
        raise ConfigError(f"--config {path}: `{key}` is no option of specdec serve", hint=f"did you mean `{near[0]}`?" if near else None)
    return known[name]


def _plain(value: Any) -> Any:
    """Return a mapping as the JSON text that the command line would have held."""
    return json.dumps(value) if isinstance(value, dict) else value
