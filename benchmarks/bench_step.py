"""What does one target step cost, against rows, context and requests, and how near is it to the memory floor?

Times the forward (layers and head) of the resolved target on this machine: no server, no sampling. The floor is the time in
which torch reads as many bytes as the weights have, measured in the same run. Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import platform
from itertools import product
from statistics import median
from time import perf_counter

import torch

from specdec.config.engine import EngineConfig, ModelConfig
from specdec.config.resolve import resolve
from specdec.models.attention import AttentionMetadata, KVPair, allocate_kv
from specdec.models.registry import TargetModel, load_model

BLOCK = 16
CASES = [  # requests, rows of each, context
    *product([1], [1, 2, 4, 6, 9, 16, 32], [256]),
    *product([1], [1], [64, 1024, 2048, 4000]),
    *product([2, 4, 8, 16, 32], [1, 6], [256]),
]


def metadata(requests: int, rows: int, context: int) -> tuple[torch.Tensor, AttentionMetadata]:
    """Requests of `rows` query rows each over `context` cached tokens."""
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


def time_case(model: TargetModel, kv: list[KVPair], case: tuple[int, int, int], repeats: int) -> tuple[float, float]:
    """(layers, head) in milliseconds, medians."""
    positions, meta = metadata(*case)
    ids = torch.randint(0, model.config.vocab_size, (len(positions),))
    layers, heads = [], []
    for _ in range(repeats):
        start = perf_counter()
        hidden, _ = model.forward(ids, positions, kv, meta)
        middle = perf_counter()
        model.compute_logits(hidden)
        layers.append(middle - start)
        heads.append(perf_counter() - middle)
    return median(layers) * 1e3, median(heads) * 1e3


def floor_ms(num_bytes: int, repeats: int) -> float:
    """Time to read num_bytes once, by torch's own sum over a buffer of that size."""
    buffer = torch.ones(num_bytes // 4)
    times = []
    for _ in range(repeats):
        start = perf_counter()
        buffer.sum()
        times.append(perf_counter() - start)
    return median(times) * 1e3


def main() -> None:
    """Measure every case and print it beside the floor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    arguments = parser.parse_args()
    resolved = resolve(EngineConfig(model=ModelConfig(dtype=arguments.dtype)))
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[resolved.dtype]
    with torch.inference_mode():
        model = load_model(resolved.model_path, resolved.hf_config, dtype=dtype, device=torch.device("cpu"), max_model_len=8192)
        kv = allocate_kv(model.num_layers, (1024, BLOCK, *model.kv_shape()), dtype=dtype, device=torch.device("cpu"))
        floor = floor_ms(model.num_bytes, arguments.repeats)
        path = "compiled AMX" if getattr(model, "fused", None) is not None else "eager torch"
        threads = torch.get_num_threads()
        print(f"{model.num_bytes / 1e6:.0f} MB of weights, {path} path, {threads} threads; reading them once takes {floor:.1f} ms")
        print(f"{'requests':>8} {'rows':>5} {'context':>8} {'layers ms':>10} {'head ms':>8} {'step ms':>8} {'x floor':>8}")
        records = []
        for case in CASES:
            time_case(model, kv, case, 2)
            layers, head = time_case(model, kv, case, arguments.repeats)
            records.append({"requests": case[0], "rows": case[1], "context": case[2], "layers_ms": layers, "head_ms": head})
            step = layers + head
            print(f"{case[0]:>8} {case[1]:>5} {case[2]:>8} {layers:>10.2f} {head:>8.2f} {step:>8.2f} {step / floor:>8.2f}")
    print(json.dumps({"path": path, "floor_ms": floor, "torch": torch.__version__, "cpu": platform.processor(), "cases": records}))


if __name__ == "__main__":
    main()
