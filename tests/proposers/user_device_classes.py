"""Classes that implement specdec's own protocol; named by import path like any other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.config.methods import MethodTraits
from tests.proposers.seam_proposers import LookupProposer


class Lookup(LookupProposer):
    def __init__(self, resolved: Any) -> None:
        super().__init__(resolved.traits.max_nodes)


class WantsSlots(Lookup):
    def __init__(self, resolved: Any) -> None:
        super().__init__(resolved)
        self.traits: MethodTraits = replace(self.traits, lookahead=3)


class Untraited(Lookup):
    def __init__(self, resolved: Any) -> None:
        super().__init__(resolved)
        self.traits = None  # type: ignore[assignment]


class Broken(Lookup):
    def __init__(self, resolved: Any) -> None:
        raise ValueError("no such file")
