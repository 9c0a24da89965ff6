"""How the time of a step grows: a least-squares fit over its rows, the context they read and the requests they belong to.

Owns: the fit and how far measurements are from it. Must not know: models or clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    """One shape of a step: requests, query rows of each, tokens of context of each."""

    requests: int
    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class Fit:
    """step = base + row x rows + context x (tokens of context, all requests) + request x requests; milliseconds each.

    residuals: measured over fitted, less 1, for each case. r2: of the milliseconds themselves.
    """

    base_ms: float
    row_ms: float
    context_ms: float
    request_ms: float
    residuals: tuple[float, ...]
    r2: float

    def at(self, case: Case) -> float:
        """Return the fitted time of a case in milliseconds."""
        return float(_design([case])[0] @ [self.base_ms, self.row_ms, self.context_ms, self.request_ms])

    @property
    def worst(self) -> int:
        """Index of the case that takes most above the fit, relatively: where a cliff would be."""
        return int(np.argmax(self.residuals))


def fit(cases: Sequence[Case], step_ms: Sequence[float]) -> Fit:
    """Fit by least squares of relative errors, so that a step of 15 ms weighs as much as one of 100 ms.

    Raises:
        ValueError: fewer cases than the four coefficients, or no times above zero.
    """
    times = np.asarray(step_ms, dtype=np.float64)
    if len(cases) != len(times) or len(cases) < 4 or times.min() <= 0:
        raise ValueError(f"{len(times)} times for {len(cases)} cases, but a fit needs 4 or more, all positive")
    design = _design(cases)
    coefficients, *_ = np.linalg.lstsq(design / times[:, None], np.ones(len(times)), rcond=None)
    fitted = design @ coefficients
    r2 = 1 - float(((times - fitted) ** 2).sum() / ((times - times.mean()) ** 2).sum())
    base, row, context, request = coefficients.tolist()
    residuals = tuple((times / fitted - 1).tolist())
    return Fit(base_ms=base, row_ms=row, context_ms=context, request_ms=request, residuals=residuals, r2=r2)


def _design(cases: Sequence[Case]) -> np.ndarray:
    """One line for each case: 1, rows, tokens of context, requests, over all requests."""
    columns = [(1.0, case.requests * case.rows, case.requests * case.context, case.requests) for case in cases]
    return np.asarray(columns, dtype=np.float64)
