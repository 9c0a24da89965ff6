"""Question: are the kernels right on this GPU, how near are they to its memory's speed, and what do drafts bring to models of real size?

    python benchmarks/gpu.py                    # all of it, within 8 minutes; prints tables, writes benchmarks/results/gpu.json
    python benchmarks/gpu.py --seconds 120      # what fits; what was left out is said

1. Every kernel against its plain reference, and its time against the time that its bytes take at the measured copy speed.
2. A verify step of random-weight models (Qwen3-0.6B and Llama-3-8B shapes): forward, logits, and `synthetic` acceptance, over batches and
   numbers of drafts; tokens a second if drafts were free and kept at the rates of --alpha.
3. The smaller model against transformers over the same weights: logits, and time of a decode step.

Needs torch 2.11, triton 3.6 and transformers 5.17 or newer, and this checkout; nothing else of specdec's own needs. Without a GPU it
runs a tiny form on the CPU, which says whether the script works and nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_kernels import Call, Sizes, calls, results
from benchmarks.random_model import build, build_transformers
from specdec.kernels.dispatch import kernel, load
from specdec.models.attention import AttentionMetadata, allocate_kv

RESULTS = Path(__file__).resolve().parent / "results" / "gpu.json"
SERVED = Sizes(requests=32, drafts=5, context=2048, vocab=151936, hidden=4096, heads=32, kv_heads=8, head_dim=128)
CHECKED = Sizes(
    requests=3, drafts=4, context=77, vocab=4999, hidden=512, heads=8, kv_heads=2, head_dim=128
)  # the reference loops in Python
TINY = Sizes(requests=2, drafts=3, context=20, vocab=257, hidden=64, heads=4, kv_heads=2, head_dim=32)
BATCHES, DRAFTS, CONTEXT, BLOCK = (1, 2, 4, 8, 16, 32, 64, 128), (0, 1, 2, 3, 5, 7), 512, 16


@dataclass(slots=True)
class Run:
    """The device, the clock, and what was found. skipped: what there was no time or memory for."""

    device: torch.device
    dtype: torch.dtype
    ends_s: float
    found: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"kernels": [], "steps": [], "transformers": []})
    skipped: list[str] = field(default_factory=list)

    def has_time(self, what: str) -> bool:
        """Whether there is; else `what` is noted as skipped."""
        if perf_counter() < self.ends_s:
            return True
        self.skipped.append(what)
        return False

    def add(self, part: str, **row: Any) -> None:
        """Keep a row, and show it at once."""
        self.found[part].append(row)
        print("  " + "  ".join(f"{key} {_shown(value)}" for key, value in row.items()), file=sys.stderr, flush=True)

    def time_ms(self, run: Callable[[], Any], *, repeats: int = 20) -> float:
        """Median milliseconds of a call, behind a warm-up."""
        for _ in range(3):
            run()
        return self._events_ms(run, repeats) if self.device.type == "cuda" else self._clock_ms(run, repeats)

    def _events_ms(self, run: Callable[[], Any], repeats: int) -> float:
        make: Any = torch.cuda.Event
        pairs = [(make(enable_timing=True), make(enable_timing=True)) for _ in range(repeats)]
        for start, stop in pairs:
            start.record()
            run()
            stop.record()
        torch.cuda.synchronize()
        return float(median(start.elapsed_time(stop) for start, stop in pairs))

    def _clock_ms(self, run: Callable[[], Any], repeats: int) -> float:
        times = []
        for _ in range(repeats):
            start = perf_counter()
            run()
            times.append(perf_counter() - start)
        return median(times) * 1e3


def copy_gb_per_s(run: Run) -> float:
    """Bytes read and written a second by torch's own copy: the speed that floors are told in."""
    size = 2**30 if run.device.type == "cuda" else 2**24
    source = torch.empty(size, dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    return 2 * size / (run.time_ms(lambda: target.copy_(source)) * 1e-3) / 1e9


def check_kernels(run: Run, sizes: Sizes) -> None:
    """Each kernel's result against the reference's, on sizes that the reference can walk through."""
    for call in calls(sizes, run.device, run.dtype):
        if not run.has_time(f"check of {call.name}"):
            return
        mine = results(call, kernel(call.name, run.device))
        want = results(_on_cpu(call), load(call.name, "reference"))
        run.add("kernels", kernel=call.name, case=call.label, differs=max(map(_difference, mine, want), default=0.0))


def _on_cpu(call: Call) -> Call:
    def moved(value: Any) -> Any:
        return value.cpu() if isinstance(value, torch.Tensor) else value

    arguments = tuple(map(moved, call.arguments))
    return Call(**{**_fields(call), "arguments": arguments, "options": {key: moved(value) for key, value in call.options.items()}})


def _fields(call: Call) -> dict[str, Any]:
    return {name: getattr(call, name) for name in Call.__slots__}


def _difference(mine: torch.Tensor, want: torch.Tensor) -> float:
    """Share of other values for integers; norm of the difference over the norm for numbers."""
    mine = mine.cpu()
    if not mine.is_floating_point():
        return float((mine != want).float().mean()) if mine.numel() else 0.0
    gap = (mine.double() - want.double()).norm()
    return float(gap / want.double().norm().clamp(min=1e-30))


def time_kernels(run: Run, sizes: Sizes, speed: float) -> None:
    """Each kernel's time, and how many times the floor of its bytes that is."""
    for call in calls(sizes, run.device, run.dtype):
        if not run.has_time(f"time of {call.name}"):
            return
        took = run.time_ms(partial(kernel(call.name, run.device), *call.arguments, **call.options))
        floor = call.num_bytes / speed * 1e-6
        run.add("kernels", kernel=call.name, case=call.label, ms=took, floor_ms=floor, times_floor=took / floor)


def metadata(requests: int, rows: int, device: torch.device) -> tuple[torch.Tensor, AttentionMetadata]:
    """Positions and metadata of requests with `rows` query rows each behind CONTEXT cached tokens."""
    blocks = -(-(CONTEXT + rows) // BLOCK)
    table = torch.arange(requests * blocks, dtype=torch.int32, device=device).view(requests, blocks)
    places = torch.arange(CONTEXT, CONTEXT + rows, device=device)
    slots = (table[:, places // BLOCK].long() * BLOCK + places % BLOCK).flatten()
    meta = AttentionMetadata(
        cu_query_lens=torch.arange(0, (requests + 1) * rows, rows, dtype=torch.int32, device=device),
        seq_lens=torch.full((requests,), CONTEXT + rows, dtype=torch.int32, device=device),
        block_table=table,
        slot_mapping=slots,
        query_lens_cpu=(rows,) * requests,
        seq_lens_cpu=(CONTEXT + rows,) * requests,
    )
    return places.repeat(requests), meta


def cases(batches: tuple[int, ...], drafts: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(batch, drafts), the informative corners first, so that a short run has them."""
    order = sorted(
        ((batch, k) for batch in batches for k in drafts), key=lambda case: (case[0] not in (1, 8, 32, 128), case[1] not in (0, 3))
    )
    yield from order


def time_steps(run: Run, name: str, model: Any, *, batches: tuple[int, ...], drafts: tuple[int, ...], alpha: float) -> None:
    """Verify steps of one model: time, tokens a step at the acceptance of `alpha`, and tokens a second against none."""
    plain: dict[int, float] = {}
    blocks = max(batches) * -(-(CONTEXT + max(drafts) + 1) // BLOCK)
    kv = allocate_kv(model.num_layers, (blocks, BLOCK, *model.kv_shape()), dtype=run.dtype, device=run.device)
    for batch, k in cases(batches, drafts):
        if not run.has_time(f"{name}, batch {batch}, {k} drafts"):
            continue
        took = run.time_ms(verify_step(run, model, kv, batch=batch, k=k, alpha=alpha), repeats=10)
        emitted = sum(alpha**i for i in range(k + 1))  # what the synthetic rule keeps on average (Leviathan et al., Equation 1)
        plain[batch] = took if k == 0 else plain.get(batch, float("nan"))
        rate = batch * emitted / took * 1e3
        run.add(
            "steps", model=name, batch=batch, drafts=k, ms=took, tokens=emitted, tok_per_s=rate, speedup=rate * plain[batch] / batch / 1e3
        )


def verify_step(run: Run, model: Any, kv: list[Any], *, batch: int, k: int, alpha: float) -> Callable[[], Any]:
    """A step without a scheduler: forward over all rows, logits, argmax, and the synthetic rule."""
    rows, device = k + 1, run.device
    positions, meta = metadata(batch, rows, device)
    ids = torch.randint(0, model.config.vocab_size, (batch * rows,), device=device)
    bounds = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=device)
    rates = torch.full((max(k, 1),), alpha, device=device)
    seed = torch.arange(batch, dtype=torch.int64, device=device)
    judge = kernel("synthetic", device)

    def step() -> Any:
        hidden, _ = model.forward(ids, positions, kv, meta)
        targets = model.compute_logits(hidden).argmax(dim=-1)
        drafts = targets.view(batch, rows)[:, : max(k, 1)].contiguous() if k else targets.new_full((batch, 1), -1)
        return judge(targets, drafts, cu_num_logits=bounds, rates=rates, seed=seed, position=seed)

    return step


@torch.inference_mode()
def compare_transformers(run: Run, name: str, model: Any, weights: Any) -> None:
    """Logits of one text, and a decode step behind CONTEXT tokens, in both libraries over the same weights."""
    theirs = build_transformers(name, weights)
    ids = torch.randint(0, model.config.vocab_size, (64,), device=run.device)
    kv = allocate_kv(model.num_layers, (8, BLOCK, *model.kv_shape()), dtype=run.dtype, device=run.device)
    table = torch.arange(8, dtype=torch.int32, device=run.device)[None]
    places = torch.arange(64, device=run.device)
    meta = AttentionMetadata(
        cu_query_lens=torch.tensor([0, 64], dtype=torch.int32, device=run.device),
        seq_lens=torch.tensor([64], dtype=torch.int32, device=run.device),
        block_table=table,
        slot_mapping=places,
        query_lens_cpu=(64,),
        seq_lens_cpu=(64,),
    )
    mine = model.compute_logits(model.forward(ids, places, kv, meta)[0]).float()
    want = theirs(input_ids=ids[None]).logits[0].float()
    run.add("transformers", model=name, case="logits of 64 tokens", differs=_difference(mine, want.cpu()))
    for batch in (1, 8):
        if not run.has_time(f"{name} in transformers, batch {batch}"):
            return
        own_kv = allocate_kv(
            model.num_layers, (batch * -(-(CONTEXT + 1) // BLOCK), BLOCK, *model.kv_shape()), dtype=run.dtype, device=run.device
        )
        ours_ms = run.time_ms(verify_step(run, model, own_kv, batch=batch, k=0, alpha=0.0), repeats=10)
        theirs_ms = run.time_ms(_their_step(theirs, batch, run.device), repeats=10)
        run.add(
            "transformers", model=name, case=f"decode step, batch {batch}", ms=ours_ms, transformers_ms=theirs_ms, ratio=theirs_ms / ours_ms
        )


def _their_step(model: Any, batch: int, device: torch.device) -> Callable[[], Any]:
    cache = model(input_ids=torch.randint(0, model.config.vocab_size, (batch, CONTEXT), device=device), use_cache=True).past_key_values
    token = torch.zeros(batch, 1, dtype=torch.int64, device=device)

    def step() -> Any:
        result = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(dim=-1)
        cache.crop(-1)
        return result

    return step


@torch.inference_mode()
def measure(run: Run, *, alpha: float, models: tuple[str, ...]) -> None:
    """All parts, in the order of what matters most."""
    is_gpu = run.device.type == "cuda"
    print("kernels against their references", file=sys.stderr)
    check_kernels(run, CHECKED if is_gpu else TINY)
    speed = copy_gb_per_s(run)
    print(f"kernels against their bytes at {speed:.0f} GB/s", file=sys.stderr)
    time_kernels(run, SERVED if is_gpu else TINY, speed)
    for place, name in enumerate(models):
        print(f"verify steps of {name}", file=sys.stderr)
        if not run.has_time(name):
            continue
        model, weights = build(name, run.device, run.dtype, keeps=place == 0)
        if place == 0:
            compare_transformers(run, name, model, weights)
            weights.made.clear()
        batches, drafts = (BATCHES, DRAFTS) if is_gpu else ((1, 2), (0, 2))
        time_steps(run, name, model, batches=batches, drafts=drafts, alpha=alpha)
        del model, weights


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def tables(found: dict[str, list[dict[str, Any]]]) -> str:
    """The rows as Markdown, one table for each set of columns."""
    lines: list[str] = []
    columns: tuple[str, ...] = ()
    for row in (row for part in found.values() for row in part):
        if tuple(row) != columns:
            columns = tuple(row)
            lines += ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines.append("| " + " | ".join(_shown(value) for value in row.values()) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write; exit code 1 where a kernel differs from its reference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=440.0, help="no new case begins after this time")
    parser.add_argument("--alpha", type=float, default=0.7, help="acceptance rate of each draft, given those before it")
    parser.add_argument(
        "--models", nargs="+", default=["qwen3-0.6b", "llama-3-8b"], help="shapes of random_model.py; the first is compared"
    )
    parser.add_argument("--cpu", action="store_true", help="the tiny form, also where there is a GPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    is_gpu = torch.cuda.is_available() and not options.cpu
    device = torch.device("cuda" if is_gpu else "cpu")
    run = Run(device, torch.bfloat16 if is_gpu else torch.float32, perf_counter() + options.seconds)
    measure(run, alpha=options.alpha, models=tuple(options.models) if is_gpu else ("tiny",))
    about = {
        "device": torch.cuda.get_device_name() if is_gpu else "cpu, tiny form: no figure here is one of speed",
        "torch": torch.__version__,
    }
    print(tables(run.found))
    if run.skipped:
        print(f"\nleft out for lack of time: {', '.join(run.skipped)}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(about | {"skipped": run.skipped} | run.found, indent=1) + "\n", encoding="utf-8")
    wrong = [row for row in run.found["kernels"] + run.found["transformers"] if row.get("differs", 0.0) > 0.02]
    print("\nall agree with their references" if not wrong else f"\nDIFFER: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
