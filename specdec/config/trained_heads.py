"""Draft heads that come with specdec, for the targets they were trained with.

Owns: where they lie and which is preferred. Must not know: how they draft.
"""

from __future__ import annotations

from pathlib import Path

from specdec.config.engine import EMBEDDED_MODEL
from specdec.config.method_configs import DsparkConfig, Eagle3Config

ASSETS = Path(__file__).resolve().parent.parent / "assets"
DSPARK_DRAFTS, EAGLE3_DRAFTS = 7, 4


def trained_head(model: str) -> DsparkConfig | Eagle3Config | None:
    """Return the drafter that was trained for a target and comes with this package, or None. model: as in ModelConfig."""
    if model != EMBEDDED_MODEL:
        return None
    name = EMBEDDED_MODEL.removesuffix("-instruct")
    chain, block = ASSETS / f"{name}-eagle3", ASSETS / f"{name}-dspark"
    if chain.is_dir():
        return Eagle3Config(model=str(chain), num_speculative_tokens=EAGLE3_DRAFTS)
    if block.is_dir():
        return DsparkConfig(model=str(block), num_speculative_tokens=DSPARK_DRAFTS)
    return None
