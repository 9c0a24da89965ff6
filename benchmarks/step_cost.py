"""What does one step cost, against rows, context and requests, how near is it to the memory floor, and what is the host's part?

    python benchmarks/step_cost.py --seconds 120 --plot step.svg

Times the forward (layers and head) of the target on this machine for each shape, in rounds over all shapes in a new order each time, and
takes medians: no server, no sampling. Fits base + rows + context + requests by least squares and names the shape that lies furthest
above the fit. The floor is the time in which torch reads as many bytes as the weights have, measured in the same rounds. Then it steps
the engine with 1, 8 and 64 requests, without drafts and with --method, and prints what is not the model. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.arms import machine
from benchmarks.host_work import host_work, one_step_at_a_time
from benchmarks.plots import draw, fit_panel
from benchmarks.step_fit import Case, Fit, fit
from specdec.config.engine import EMBEDDED_MODEL, EngineConfig, ModelConfig, ResolvedConfig
from specdec.config.resolve import resolve
from specdec.config.speculative import parse_speculative
from specdec.engine.core import EngineCore
from specdec.errors import ConfigError, SpecdecError
from specdec.models.attention import AttentionMetadata, KVPair, allocate_kv
from specdec.models.registry import TargetModel, load_model

BLOCK = 16
MIN_ROUNDS = 3
ROWS, CONTEXTS, REQUESTS = (1, 2, 4, 6, 9, 12, 16, 24, 32, 48, 64), (16, 64, 256, 512, 1024, 2048, 3072, 4000), (1, 2, 4, 8, 16, 32, 64)
BASE = Case(1, 1, 256)


def cases(max_len: int) -> list[Case]:
    """Return the shapes: each of the three grows alone, then together; contexts that the model cannot have are left out."""
    base = BASE._replace(context=min(BASE.context, max_len // 2))
    found = [base._replace(rows=rows) for rows in ROWS]
    found += [base._replace(context=context) for context in CONTEXTS]
    found += [base._replace(requests=requests) for requests in REQUESTS]
    found += [Case(*sizes) for sizes in product([4, 8, 16], [6], [base.context, 1024])]
    return [case for case in dict.fromkeys(found) if case.context + case.rows <= max_len]


def metadata(case: Case) -> tuple[torch.Tensor, AttentionMetadata]:
    """Return positions and metadata of a step of that shape, every request over blocks of its own."""
    requests, rows, context = case
    blocks = -(-(context + rows) // BLOCK)
    table = torch.arange(requests * blocks, dtype=torch.int32).view(requests, blocks)
    places = torch.arange(context, context + rows)
    slots = (table[:, places // BLOCK].long() * BLOCK + places % BLOCK).flatten()
    meta = AttentionMetadata(
        cu_query_lens=torch.arange(0, (requests + 1) * rows, rows, dtype=torch.int32),
        seq_lens=torch.full((requests,), context + rows, dtype=torch.int32),
        block_table=table,
        slot_mapping=slots,
        query_lens_cpu=(rows,) * requests,
        seq_lens_cpu=(context + rows,) * requests,
    )
    return places.repeat(requests), meta


def time_case(model: TargetModel, kv: list[KVPair], case: Case) -> float:
    """Return the milliseconds of one forward, layers and head."""
    positions, meta = metadata(case)
    ids = torch.randint(0, model.config.vocab_size, (len(positions),))
    start_s = perf_counter()
    hidden, _ = model.forward(ids, positions, kv, meta)
    model.compute_logits(hidden)
    return 1e3 * (perf_counter() - start_s)


def time_floor(buffer: torch.Tensor) -> float:
    """Return the milliseconds in which torch's own sum reads the buffer once."""
    start_s = perf_counter()
    buffer.sum()
    return 1e3 * (perf_counter() - start_s)


def measure_steps(resolved: ResolvedConfig, seconds: float) -> dict[str, Any]:
    """Return cases, the median time of each, the floor, and how the model runs; rounds go on until the time is over, 3 at least."""
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[resolved.dtype]
    shapes = cases(resolved.max_model_len)
    num_blocks = max(case.requests * -(-(case.context + case.rows) // BLOCK) for case in shapes)
    times: dict[Case, list[float]] = {case: [] for case in shapes}
    floor: list[float] = []
    with torch.inference_mode():
        model = load_model(
            resolved.model_path, resolved.hf_config, dtype=dtype, device=torch.device("cpu"), max_model_len=resolved.max_model_len
        )
        kv = allocate_kv(model.num_layers, (num_blocks, BLOCK, *model.kv_shape()), dtype=dtype, device=torch.device("cpu"))
        buffer = torch.ones(model.num_bytes // 4)
        for case in shapes:
            time_case(model, kv, case)  # compiles what is compiled on first use
        end_s, order = monotonic() + seconds, random.Random(0)
        while len(floor) < MIN_ROUNDS or monotonic() < end_s:
            floor.append(time_floor(buffer))
            for case in order.sample(shapes, len(shapes)):
                times[case].append(time_case(model, kv, case))
    path = "compiled AMX" if getattr(model, "fused", None) is not None else "eager torch"
    found = {"path": path, "threads": torch.get_num_threads(), "weights_mb": model.num_bytes / 1e6, "rounds": len(floor)}
    return {**found, "floor_ms": median(floor), "cases": shapes, "step_ms": [median(times[case]) for case in shapes]}


def measure_host(model: str, method: str, requests: Sequence[int], steps: int) -> list[dict[str, Any]]:
    """Return the phases of a step without drafts and with the method, for each number of requests."""
    found = []
    for name in ("off", method):
        config = {"method": name, "num_speculative_tokens": 5, "policy": "fixed"}
        speculative = None if name == "off" else parse_speculative(json.dumps(config))
        resolved = resolve(EngineConfig(model=ModelConfig(model=model), speculative=speculative))
        core = EngineCore.from_config(one_step_at_a_time(resolved, max_num_seqs=max(requests)))
        try:
            found += [{"drafts": name, "requests": count, **host_work(core, count, steps=steps)} for count in requests]
        finally:
            core.close()
    return found


def print_steps(steps: dict[str, Any], found: Fit) -> None:
    """Print each shape beside the floor and the fit, and the fit."""
    floor = steps["floor_ms"]
    print(
        f"{steps['weights_mb']:.0f} MB of weights, {steps['path']} path, {steps['threads']} threads, median of {steps['rounds']} rounds; "
        f"reading the weights once takes {floor:.1f} ms"
    )
    print(f"{'requests':>8} {'rows':>5} {'context':>8} {'step ms':>8} {'x floor':>8} {'fit ms':>8} {'off by':>7}")
    for case, step, residual in zip(steps["cases"], steps["step_ms"], found.residuals, strict=True):
        shape = f"{case.requests:>8} {case.rows:>5} {case.context:>8}"
        print(f"{shape} {step:>8.2f} {step / floor:>8.2f} {found.at(case):>8.2f} {residual:>+7.0%}")
    worst = steps["cases"][found.worst]
    print(
        f"fit: {found.base_ms:.2f} ms + {1e3 * found.row_ms:.0f} us a row + {1e6 * found.context_ms:.0f} us per 1000 tokens of context "
        f"+ {1e3 * found.request_ms:.0f} us a request; R2 {found.r2:.3f}; furthest above it: {found.residuals[found.worst]:+.0%} at "
        f"{worst.requests} requests of {worst.rows} rows over {worst.context} tokens"
    )


def print_host(lines: Sequence[dict[str, Any]]) -> None:
    """Print the phases in milliseconds; host is all but forward, verify and propose."""
    names = ("schedule", "prepare", "forward", "verify", "propose", "output", "step", "host")
    print(f"{'drafts':>8} {'requests':>8} " + " ".join(f"{name:>9}" for name in names))
    for line in lines:
        print(f"{line['drafts']:>8} {line['requests']:>8} " + " ".join(f"{line[name]:>9.3f}" for name in names))


def draw_steps(path: Path, steps: dict[str, Any], found: Fit) -> None:
    """Draw step time against each of the three, and measured against fitted over all shapes."""
    measured = dict(zip(steps["cases"], steps["step_ms"], strict=True))
    base = steps["cases"][0]
    panels = []
    for name, label in (("rows", "rows of one request"), ("context", "tokens of context"), ("requests", "requests of one row")):
        line = [case for case in measured if case._replace(**{name: getattr(base, name)}) == base]
        sizes = [getattr(case, name) for case in line]
        panels.append(
            fit_panel(
                sizes,
                [measured[case] for case in line],
                list(map(found.at, line)),
                title=f"against {name}",
                xlabel=label,
                ylabel="step, ms",
            )
        )
    fitted = list(map(found.at, measured))
    panels.append(fit_panel(fitted, list(measured.values()), fitted, title="all shapes", xlabel="fitted, ms", ylabel="measured, ms"))
    here = machine()
    draw(path, [panels], title=f"{here['cpu']}, {here['cores']} cores; commit {here['commit']}; {steps['path']}")


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--seconds", type=float, default=120, help="of timing forwards; 3 rounds at least")
    parser.add_argument(
        "--host-requests", nargs="*", type=int, default=[1, 8, 64], help="numbers of requests for the host's part; none: skip it"
    )
    parser.add_argument("--host-steps", type=int, default=40)
    parser.add_argument("--method", default="suffix", help="drafting method for the host's part, one that needs no checkpoint")
    parser.add_argument("--plot", type=Path, help="picture of the fit, .svg or .png")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure, fit, print, draw."""
    args = parse_args(argv)
    resolved = resolve(EngineConfig(model=ModelConfig(model=args.model, dtype=args.dtype)))
    if resolved.device != "cpu":
        raise ConfigError("this times the CPU", hint="on a GPU run benchmarks/gpu.py")
    steps = measure_steps(resolved, args.seconds)
    found = fit(steps["cases"], steps["step_ms"])
    print_steps(steps, found)
    if args.plot is not None:
        draw_steps(args.plot, steps, found)
    host = measure_host(args.model, args.method, args.host_requests, args.host_steps) if args.host_requests else []
    if host:
        print_host(host)
    coefficients = {name: getattr(found, name) for name in ("base_ms", "row_ms", "context_ms", "request_ms", "r2")}
    print(json.dumps({**machine(), **steps, "fit": coefficients, "host": host}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SpecdecError as error:
        sys.exit(error.render())
