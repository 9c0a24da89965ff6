"""specdec estimate: what speculation gains on paper, before anything is served.

Owns: Equation 1 and Theorem 3.8 of Leviathan et al. 2023, arXiv:2211.17192, and how they are printed. Must not know: engines, models.

Both assume that acceptances are independent with one rate, and that verifying k + 1 rows costs as much as one plain step. Real
steps cost more and real acceptance varies, so these numbers are ceilings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from specdec.errors import ConfigError

LONGEST = 64  # drafts; the search for the best k stops here
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
COSTS = (0.02, 0.05, 0.10, 0.33)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Tokens per target pass and speedup at k drafts, and the best k up to LONGEST: 0 where plain decoding is fastest.

    alpha: acceptance rate of one draft. cost: one draft's time over one target step's. A speedup of 1 is plain decoding.
    """

    alpha: float
    k: int
    cost: float
    tokens_per_pass: float
    speedup: float
    best_k: int
    best_speedup: float


def tokens_per_pass(alpha: float, k: int) -> float:
    """Expected tokens of one target pass over k drafts: Equation 1, (1 - alpha^(k+1)) / (1 - alpha)."""
    return float(k + 1) if alpha == 1.0 else (1.0 - alpha ** (k + 1)) / (1.0 - alpha)


def speedup(alpha: float, k: int, cost: float) -> float:
    """Walltime of plain decoding over that of speculation: Theorem 3.8, tokens per pass over k * cost + 1."""
    return tokens_per_pass(alpha, k) / (k * cost + 1.0)


def best_k(alpha: float, cost: float) -> int:
    """The k in 0..LONGEST with the largest speedup, the smallest of equal ones."""
    return max(range(LONGEST + 1), key=lambda k: (speedup(alpha, k, cost), -k))


def estimate(alpha: float, k: int, cost: float) -> Estimate:
    """Return all figures of one point.

    Raises:
        ConfigError: alpha outside [0, 1], k outside 0..LONGEST, or a negative cost.
    """
    _require("alpha", alpha, 0.0 <= alpha <= 1.0, "be in [0, 1]: it is the share of drafts that are accepted")
    _require("k", k, 0 <= k <= LONGEST, f"be in 0..{LONGEST} drafts")
    _require("cost", cost, 0.0 <= cost < float("inf"), "be 0 or more: it is one draft's time over one target step's")
    best = best_k(alpha, cost)
    return Estimate(
        alpha=alpha,
        k=k,
        cost=cost,
        tokens_per_pass=tokens_per_pass(alpha, k),
        speedup=speedup(alpha, k, cost),
        best_k=best,
        best_speedup=speedup(alpha, best, cost),
    )


def read_numbers(text: str, option: str) -> tuple[float, ...]:
    """Read "0.5,0.6" or "0.5:0.9:0.1" (first, last, step; both ends included).

    Raises:
        ConfigError: neither form, or more than 100 numbers.
    """
    hint = f"write {option} 0.5,0.6,0.7 or {option} 0.5:0.9:0.1"
    try:
        if ":" not in text:
            return tuple(float(part) for part in text.split(","))
        first, last, step = (float(part) for part in text.split(":"))
        count = int((last - first) / step + 1e-9) + 1
    except (ValueError, ZeroDivisionError, OverflowError):
        raise ConfigError(f"{option} is {text!r}, which is no list of numbers and no range", hint=hint) from None
    if not (step > 0 and 1 <= count <= 100):
        raise ConfigError(f"{option} is {text!r}, but a range needs a positive step and 1 to 100 numbers", hint=hint)
    return tuple(round(first + index * step, 10) for index in range(count))


def run_and_print(point: Estimate, *, alphas: Sequence[float], costs: Sequence[float], as_json: bool) -> None:
    """Print one point and the table of alphas x costs at its k, for people or as one JSON object."""
    table = [[estimate(alpha, point.k, cost) for cost in costs] for alpha in alphas]
    if as_json:
        print(json.dumps({**asdict(point), "table": [asdict(cell) for row in table for cell in row]}))
        return
    print(f"acceptance {point.alpha:g}, {point.k} drafts, each costing {point.cost:g} of a target step:")
    print(f"  tokens per target pass  {point.tokens_per_pass:.2f}")
    print(f"  speedup                 {point.speedup:.2f}x")
    print(f"  best number of drafts   {_best_in_words(point)}")
    _print_table(table, point.k)
    print("ceilings: acceptance is taken as independent, and a pass over k + 1 rows as costing one plain step")


def _best_in_words(point: Estimate) -> str:
    if point.best_k == 0:
        return "0: drafts that cost this much never pay at this acceptance"
    limit = " (the longest that is tried)" if point.best_k == LONGEST else ""
    return f"{point.best_k}{limit}, {point.best_speedup:.2f}x"


def _print_table(table: Sequence[Sequence[Estimate]], k: int) -> None:
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=f"speedup at {k} drafts (best number of drafts: its speedup)", title_justify="left")
    grid.add_column("acceptance", justify="right")
    grid.add_column("tokens per pass", justify="right")
    for cell in table[0]:
        grid.add_column(f"cost {cell.cost:g}", justify="right")
    for row in table:
        cells = [f"{cell.speedup:.2f}x ({cell.best_k}: {cell.best_speedup:.2f}x)" for cell in row]
        grid.add_row(f"{row[0].alpha:g}", f"{row[0].tokens_per_pass:.2f}", *cells)
    Console(width=max(100, 34 + 22 * len(table[0]))).print(grid)


def _require(name: str, value: float, ok: bool, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value}, but it must {rule}")
