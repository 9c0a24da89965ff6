"""mask_token_of: the id that stands for a place to be drafted, as each publisher names it.

Owns: the names. Must not know: who feeds it.
"""

from __future__ import annotations

from typing import Any

from specdec.errors import ConfigError

_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def mask_token_of(hf_config: Any, vocab_size: int) -> int:
    """Return the mask id of a draft's config.json. vocab_size: rows of the embedding that reads it.

    Raises:
        ConfigError: none is named, or it lies outside the vocabulary.
    """
    named: dict[str, Any] = {key: getattr(hf_config, key, None) for key in _KEYS}
    named = {"dflash_config.mask_token_id": (getattr(hf_config, "dflash_config", None) or {}).get("mask_token_id"), **named}
    for key, value in named.items():
        if value is None:
            continue
        if isinstance(value, int) and 0 <= value < vocab_size:
            return value
        raise ConfigError(
            f"draft config.json: {key} is {value!r}, but the embedding has ids 0 to {vocab_size - 1}", hint="export the draft again"
        )
    raise ConfigError(f"draft config.json names no mask token ({', '.join(_KEYS)})", hint="choose a draft that was trained with masks")
