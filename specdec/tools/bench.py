"""One or several servers under the same loads, in turns: what `specdec bench` and the benchmarks share.

Owns: which prompts go where and in what order, and the record of a run. Must not know: how servers were started, or tables.
Read next: loadgen.py for one load on one server, bench_table.py for what is printed.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specdec.tools.loadgen import Client, Load, measure
from specdec.tools.prompts import Workload, prompts_for, warmup_prompts
from specdec.tools.samples import FIGURES, Summary, middle

WARMUP_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A running server to measure. model: none is the first it lists. extra_body: fields of every request."""

    label: str
    url: str
    model: str | None = None
    api_key: str | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def client(self) -> Client:
        """Return a client that is not started yet."""
        return Client(self.url, api_key=self.api_key, model=self.model, extra_body=self.extra_body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which loads, how often. num_requests: of each cell and repeat; 0 is twice the requests in flight, at least 6.

    warmup: prompts of each workload before anything is measured. skip: prompts that these servers answered before.
    """

    workloads: Sequence[Workload] = ("chat",)
    concurrency: Sequence[int] = (1,)
    rates: Sequence[float] = ()
    num_requests: int = 0
    repeats: int = 1
    max_tokens: int = 128
    seed: int = 0
    warmup: int = 4
    skip: int = 0

    def cells(self) -> list[Cell]:
        """Return the cells in order, with the prompts dealt so that none is used twice.

        Raises:
            ConfigError: a workload has too few prompts for all cells.
        """
        cells: list[Cell] = []
        for workload in self.workloads:
            skip = self.skip
            for load in self._loads(workload):
                cells.append(Cell(load, self.repeats, skip))
                cells[-1].prompts(self.repeats - 1)  # refuses now rather than in an hour
                skip += load.num_requests * self.repeats
        return cells

    def _loads(self, workload: Workload) -> list[Load]:
        shared: dict[str, Any] = {"workload": workload, "max_tokens": self.max_tokens, "seed": self.seed}
        closed = [Load(concurrency=c, num_requests=self.num_requests or max(6, 2 * c), **shared) for c in self.concurrency]
        return closed + [Load(rate=r, num_requests=self.num_requests or max(6, round(20 * r)), **shared) for r in self.rates]


@dataclass(slots=True)
class Cell:
    """One load, measured on every side, `repeats` times each. runs: label -> one summary a repeat."""

    load: Load
    repeats: int
    skip: int  # prompts of the workload that earlier cells used up
    runs: dict[str, list[Summary]] = field(default_factory=dict)

    def prompts(self, repeat: int) -> list[str]:
        """Return the prompts of a repeat: the same for each side, and never used before in these servers' lives."""
        return prompts_for(self.load.workload, self.load.num_requests, skip=self.skip + repeat * self.load.num_requests)


def describe(load: Load) -> str:
    """Return a load in words: `chat, 4 in flight`."""
    return f"{load.workload}, {load.concurrency} in flight" if load.rate is None else f"{load.workload}, Poisson {load.rate:g}/s"


async def run_cells(sides: Sequence[Side], cells: Sequence[Cell], plan: Plan) -> None:
    """Measure all cells on running servers, after a warm-up, and fill `runs`.

    Raises:
        ConfigError: a server does not answer.
    """
    async with started(sides) as clients:
        with progress() as bar:
            task = bar.add_task("warm-up", total=len(sides) * sum(cell.load.num_requests * cell.repeats for cell in cells))

            def show(load: Load, label: str) -> None:
                bar.update(task, description=f"{describe(load)}, {label}")

            await warm_up(clients, plan)
            for cell in cells:
                await run_cell(clients, cell, on_side=partial(show, cell.load), on_done=lambda: bar.advance(task))


@contextlib.asynccontextmanager
async def started(sides: Sequence[Side]) -> AsyncIterator[dict[str, Client]]:
    """Give a started client for each side, by label."""
    async with contextlib.AsyncExitStack() as stack:
        yield {side.label: await stack.enter_async_context(side.client()) for side in sides}


async def warm_up(clients: Mapping[str, Client], plan: Plan) -> None:
    """Answer prompts that are never measured: alone, and as many at once as the plan ever has in flight."""
    for client in clients.values():
        for workload in plan.workloads:
            prompts = warmup_prompts(workload, plan.warmup)
            for width in {1, min(len(prompts), max(plan.concurrency, default=1))} if prompts else ():
                await measure(client, prompts, Load(workload=workload, concurrency=width, max_tokens=WARMUP_TOKENS))


async def run_cell(
    clients: Mapping[str, Client],
    cell: Cell,
    *,
    on_side: Callable[[str], None] = lambda _: None,
    on_done: Callable[[], None] = lambda: None,
) -> None:
    """Measure all repeats of one cell."""
    for repeat in range(cell.repeats):
        await run_repeat(clients, cell, repeat, on_side=on_side, on_done=on_done)


async def run_repeat(
    clients: Mapping[str, Client],
    cell: Cell,
    repeat: int,
    *,
    on_side: Callable[[str], None] = lambda _: None,
    on_done: Callable[[], None] = lambda: None,
) -> None:
    """Measure one repeat of a cell, the sides in turns; the order turns round with each repeat, so that drift meets all alike."""
    for label, client in list(clients.items())[:: 1 if repeat % 2 == 0 else -1]:
        on_side(label)
        summary = await measure(client, cell.prompts(repeat), cell.load, on_done=on_done)
        cell.runs.setdefault(label, []).append(summary)


def progress() -> Progress:
    """Return a bar on stderr, silent where nobody looks."""
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())


def cell_record(cell: Cell, *, baseline: str) -> dict[str, Any]:
    """Return a cell for JSON: median, lowest and highest of each figure by label, and ratios of tok/s to the baseline by repeat."""
    ratios = {label: _ratios(runs, cell.runs[baseline]) for label, runs in cell.runs.items() if label != baseline}
    return {
        "load": {key: value for key, value in asdict(cell.load).items() if key != "seed"},
        "figures": {label: {name: _rounded(middle(runs, name)) for name in FIGURES} for label, runs in cell.runs.items()},
        "num_tokens": {label: [run.num_tokens for run in runs] for label, runs in cell.runs.items()},
        "num_errors": {label: sum(run.num_errors for run in runs) for label, runs in cell.runs.items()},
        "ratio": ratios,
        "ratio_at_least": {label: _rounded_bound(values) for label, values in ratios.items()},
    }


def num_errors(cells: Sequence[Mapping[str, Any]]) -> int:
    """Return how many requests failed in recorded cells."""
    return sum(sum(cell["num_errors"].values()) for cell in cells)


def _ratios(runs: Sequence[Summary], base: Sequence[Summary]) -> list[float]:
    """By repeat: both sides of a repeat had the same prompts, minutes apart at most."""
    return [round(run.tok_per_s / other.tok_per_s, 3) for run, other in zip(runs, base, strict=True) if other.tok_per_s > 0]


def lower_bound(ratios: Sequence[float]) -> float | None:
    """Lower end of the two-sided 95% interval of the geometric mean ratio (Student's t over pairs); None below 5 pairs."""
    if len(ratios) < 5 or min(ratios) <= 0:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    quantile = _T975[min(len(logs) - 1, len(_T975) + 3) - 4]
    return math.exp(fmean(logs) - quantile * stdev(logs) / math.sqrt(len(logs)))


_T975 = (2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093)  # from 4 degrees


def _rounded_bound(ratios: list[float]) -> float | None:
    bound = lower_bound(ratios)
    return None if bound is None else round(bound, 3)


def _rounded(values: tuple[float, float, float] | None) -> list[float] | None:
    return [round(value, 3) for value in values] if values else None
