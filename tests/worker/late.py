"""A device in slow motion on the CPU: results that are not there before somebody waits for them, and a watch on who does.

Steps run in order on one thread, each before the results of the one before are looked at: the order of a GPU's queue at its worst.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import specdec
from specdec.config.engine import ResolvedConfig
from specdec.engine.core import EngineCore
from specdec.engine.worker_thread import OwnThread
from specdec.scheduler.output import SchedulerOutput, StepResult
from specdec.worker.step_record import StepRecord
from specdec.worker.worker import load_runner
from tests.engine.tokenizers_for_tests import toy_tokenizer
from tests.proposers.tiny import Run

PACKAGE = Path(specdec.__file__).parent
OWN_COLUMN = (
    "kernels/transfers.py",
    "kernels/cpu/",
    "kernels/reference",
    "kernels/philox.py",
    "models/",
)  # the one place, and what a GPU has kernels for
READS = {"tolist", "item", "cpu", "numpy", "nonzero", "masked_select", "unique", "equal", "is_nonzero"}
CASTS = {"__bool__", "__int__", "__float__", "__index__", "__contains__"}


class LateDownloads:
    """Copies that are here once somebody has waited for them."""

    is_late = True

    def start(self, *tensors: torch.Tensor) -> LateDownload:
        return LateDownload([tensor.clone() for tensor in tensors])


class LateDownload:
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.is_here = False

    def lists(self) -> list[Any]:
        self.is_here = True
        return [tensor.numpy().tolist() for tensor in self._tensors]


class Watch(TorchFunctionMode):
    """Notes each place of the package that reads a tensor on the host, or makes one from numbers, where a device would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS or name in CASTS or name in ("tensor", "as_tensor") or (name == "__getitem__" and _has_mask(args[1])):
            self._note(name)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str) -> None:
        frame = sys._getframe(2)
        while frame is not None and frame.f_code is not LateDownload.lists.__code__:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                place = path.relative_to(PACKAGE).as_posix()
                if not place.startswith(OWN_COLUMN):
                    self.seen[f"{place}:{frame.f_code.co_name}: {name}"] += 1
                return
            frame = frame.f_back  # type: ignore[assignment]


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


def start_late(resolved: ResolvedConfig) -> tuple[Run, Counter[str]]:
    """An engine whose worker's results are late, and a count of the steps that did (`waited`) and did not (`queued`) wait for their own."""
    runner = load_runner(resolved)
    runner.downloads = LateDownloads()
    kinds: Counter[str] = Counter()
    execute = runner.execute

    def counting(plan: SchedulerOutput) -> StepResult:
        result = execute(plan)
        if plan.num_scheduled_tokens:
            kinds["queued" if isinstance(result, StepRecord) else "waited"] += 1
        return result

    runner.execute = counting  # type: ignore[method-assign]
    return Run(EngineCore(resolved, runner, tokenizer=toy_tokenizer(), lane=OwnThread()), runner), kinds
