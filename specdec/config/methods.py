"""MethodTraits: what one draft method needs of scheduler and worker, resolved from config and checkpoint.

Owns: the arithmetic of slots. Must not know: how any method drafts. Read next: scheduler/scheduler.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

FINAL_NORM = "final_norm"
Tap: TypeAlias = str | int  # FINAL_NORM, or m: the residual stream after m decoder layers (0 is the embedding)


class DraftKV(Enum):
    """Whose KV cache a drafter writes or reads."""

    NONE = "none"
    OWN = "own"
    TARGET = "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodTraits:
    """Needs of a draft method, all counts per request and step.

    max_nodes: drafts at most (K). max_depth: longest chain of them (D); equal to K for chains.
    draft_slots: rows that drafting takes from the token budget.
    lookahead: KV slots past the target's query. prefill_lookahead: prompt tokens past the chunk that are read.
    taps: hidden states of the target the drafter reads. laws: what kind of draft law it returns.
    """

    method: str
    max_nodes: int
    max_depth: int
    draft_slots: int = 0
    lookahead: int = 0
    prefill_lookahead: int = 0
    taps: tuple[Tap, ...] = ()
    kv: DraftKV = DraftKV.NONE
    runs_on: Literal["host", "device"] = "host"
    laws: Literal["one_hot", "dense", "sparse"] = "one_hot"
