"""Draft heads that come with specdec, for the targets they were trained with.

Owns: where they lie and which is preferred. Must not know: how they draft.
"""

from __future__ import annotations

from pathlib import Path

from specdec.config.engine import EMBEDDED_MODEL
from specdec.config.method_configs import DsparkConfig, Eagle3Config

ASSETS = Path(__file__).resolve().parent.parent / "assets"
DSPARK_DRAFTS, EAGLE3_DRAFTS = 7, 5
LEAST_TRUST = (
    0.04  # below this chance of a whole chain one more pass of the head costs more than it brings (docs/reference/included-heads.md)
)


def included_head(name: str) -> Path | None:
    """Return the directory of a head that comes with this package, named like `smollm2-135m-eagle3`, or None."""
    path = ASSETS / name
    return path if name and Path(name).name == name and path.is_dir() else None


def trained_head(model: str) -> DsparkConfig | Eagle3Config | None:
    """Return the drafter that was trained for a target and comes with this package, or None. model: as in ModelConfig."""
    if model != EMBEDDED_MODEL:
        return None
    name = EMBEDDED_MODEL.removesuffix("-instruct")
    if included_head(f"{name}-eagle3"):
        return Eagle3Config(
            model=f"{name}-eagle3", num_speculative_tokens=EAGLE3_DRAFTS, draft_confidence_threshold=LEAST_TRUST, quantization="int8"
        )
    return DsparkConfig(model=f"{name}-dspark", num_speculative_tokens=DSPARK_DRAFTS) if included_head(f"{name}-dspark") else None
