"""API keys from the command line, a file and the environment, as one list.

Owns: where keys come from. Must not know: how they are checked (server/guard.py). A key is never printed, not even in an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from specdec.errors import ConfigError

VARIABLE = "SPECDEC_API_KEYS"


def collect_keys(given: Sequence[str], path: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return all keys, each once. Files hold one key a line, blank lines and lines with # apart; the variable separates by spaces.

    Raises:
        ConfigError: the file cannot be read, or it or the variable is there and holds no key: that would open the server to all.
    """
    from_file = () if path is None else _read(path)
    from_variable = environ.get(VARIABLE, "").split()
    if VARIABLE in environ and not from_variable:
        raise ConfigError(f"{VARIABLE} is set, but it holds no key", hint=f"unset {VARIABLE} to serve without keys")
    return tuple(dict.fromkeys((*given, *from_file, *from_variable)))


def _read(path: str) -> tuple[str, ...]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"api_key_file is {path!r}, but it cannot be read: {reason}", hint="give a text file with one key a line"
        ) from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ConfigError(f"api_key_file is {path!r}, but it holds no key", hint="write one key a line, or drop --api-key-file")
    broken = next((number for number, key in enumerate(keys, start=1) if len(key.split()) > 1), None)
    if broken is not None:
        raise ConfigError(f"api_key_file is {path!r}, but its key number {broken} has spaces inside", hint="write one key a line")
    return keys
