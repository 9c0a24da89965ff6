"""specdec: a serving engine whose subject is speculative decoding."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.config.engine import EngineConfig
    from specdec.config.speculative import SpeculativeConfig
    from specdec.engine.llm import LLM
    from specdec.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "SpeculativeConfig", "__version__"]

_PUBLIC = {
    "LLM": "specdec.engine.llm",
    "EngineConfig": "specdec.config.engine",
    "SamplingParams": "specdec.sampling_params",
    "SpeculativeConfig": "specdec.config.speculative",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import specdec` stays light."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
