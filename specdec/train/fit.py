"""fit: the training loop of every head. It can be killed at any time and goes on from its last checkpoint.

Owns: optimiser, schedule, checkpoints, the log. Must not know: what a head computes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from specdec.errors import ConfigError
from specdec.train.batches import Batch, batch_at
from specdec.train.evaluation import serve_held_out
from specdec.train.shards import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """How long and how fast. batch_size: documents a step; max_len: tokens of a document; lr: peak, behind a warm-up of 4% of `steps`.

    ema: decay of the running mean of the weights, which is what is evaluated and exported.

    Raises:
        ConfigError: a value is outside its range.
    """

    steps: int = 1200
    batch_size: int = 16
    max_len: int = 320
    lr: float = 8e-4
    seed: int = 0
    save_every: int = 50
    eval_every: int = 100
    ema: float = 0.99

    def __post_init__(self) -> None:
        for name, ok, rule in (
            ("steps", self.steps > 0, "be at least 1"),
            ("batch-size", self.batch_size > 0, "be at least 1"),
            ("max-len", self.max_len >= 16, "be at least 16 tokens"),
            ("lr", 0 < self.lr < 1, "be in (0, 1)"),
            ("ema", 0 <= self.ema < 1, "be in [0, 1)"),
        ):
            if not ok:
                raise ConfigError(f"{name} is {getattr(self, name.replace('-', '_'))!r}, but it must {rule}")


class Trainee(Protocol):
    """A head in training: an nn.Module besides."""

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (loss scalar, loss by position [S])."""
        ...

    def drafts(self, batch: Batch) -> torch.Tensor:
        """As evaluation.Drafter says."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights under their public names."""
        ...

    def maps(self) -> dict[str, torch.Tensor]:
        """The draft vocabulary, as the head's format tells it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One step, for whoever shows it. acceptance: by position, of blocks of held-out answers, when this step measured it."""

    step: int
    loss: float
    by_position: tuple[float, ...]
    seconds: float
    acceptance: tuple[float, ...] | None

    @property
    def mean_length(self) -> float | None:
        """Tokens that a verify pass would emit."""
        return None if self.acceptance is None else 1 + sum(self.acceptance)


def fit(
    head: nn.Module,
    train: Sequence[Document],
    held_out: Sequence[Document],
    *,
    directory: Path,
    options: FitOptions,
    show: Callable[[Progress], None] = lambda _: None,
) -> None:
    """Train until options.steps, from the checkpoint in `directory` if there is one; the averaged weights end up in `head`.

    Raises:
        ConfigError: fewer documents than one batch.
    """
    if len(train) < options.batch_size:
        raise ConfigError(
            f"data hold {len(train)} documents, but one batch needs {options.batch_size}", hint="run specdec train data longer"
        )
    directory.mkdir(parents=True, exist_ok=True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    averaged = {name: value.detach().clone() for name, value in head.named_parameters()}
    first = _resume(directory, head, optimizer, averaged)
    for step in range(first, options.steps):
        started = time.monotonic()
        batch = batch_at(train, step, batch_size=options.batch_size, max_len=options.max_len, seed=options.seed)
        loss, parts = _advance(head, batch, optimizer, lr=options.lr * schedule(step, options.steps))
        _average(averaged, head, min(options.ema, (step + 1) / (step + 10)))
        done = step + 1
        acceptance = None
        if done % options.eval_every == 0 or done == options.steps:
            acceptance = evaluate(head, averaged, held_out, options)
        progress = Progress(
            step=done, loss=loss, by_position=tuple(parts.tolist()), seconds=time.monotonic() - started, acceptance=acceptance
        )
        _log(directory, progress)
        show(progress)
        if done % options.save_every == 0 or done == options.steps:
            _save(directory, head, optimizer, averaged, done)
    load_averaged(head, averaged)


def schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate: up over the first 4%, then a cosine down to a tenth."""
    warm_up = max(1, round(0.04 * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def _advance(head: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer, *, lr: float) -> tuple[float, torch.Tensor]:
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss, parts = head(batch)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach()), parts


@torch.no_grad()
def _average(averaged: dict[str, torch.Tensor], head: nn.Module, decay: float) -> None:
    for name, value in head.named_parameters():
        averaged[name].lerp_(value, 1 - decay)


@torch.no_grad()
def load_averaged(head: nn.Module, averaged: dict[str, torch.Tensor]) -> None:
    """Put the averaged weights in place of the last ones."""
    for name, value in head.named_parameters():
        value.copy_(averaged[name])


def evaluate(head: Any, averaged: dict[str, torch.Tensor], held_out: Sequence[Document], options: FitOptions) -> tuple[float, ...]:
    """Share of served blocks whose first s + 1 drafts are all accepted [S], with the averaged weights; () without greedy answers."""
    last = {name: value.detach().clone() for name, value in head.named_parameters()}
    load_averaged(head, averaged)
    served = serve_held_out(head, held_out, batch_size=options.batch_size, max_len=options.max_len)
    load_averaged(head, last)
    return served.by_position if served else ()


def checkpoint_path(directory: Path) -> Path:
    """The one checkpoint of a run."""
    return directory / "checkpoint.pt"


def _save(directory: Path, head: nn.Module, optimizer: torch.optim.Optimizer, averaged: dict[str, torch.Tensor], step: int) -> None:
    partial = directory / "checkpoint.partial"
    torch.save({"step": step, "head": head.state_dict(), "optimizer": optimizer.state_dict(), "averaged": averaged}, partial)
    partial.rename(checkpoint_path(directory))


def _resume(directory: Path, head: nn.Module, optimizer: torch.optim.Optimizer, averaged: dict[str, torch.Tensor]) -> int:
    if not checkpoint_path(directory).exists():
        return 0
    state = torch.load(checkpoint_path(directory), weights_only=True)
    head.load_state_dict(state["head"])
    optimizer.load_state_dict(state["optimizer"])
    for name, value in state["averaged"].items():
        averaged[name].copy_(value)
    return int(state["step"])


def _log(directory: Path, progress: Progress) -> None:
    with (directory / "log.jsonl").open("a") as log:
        log.write(json.dumps(asdict(progress)) + "\n")
