"""Question: does every Triton kernel compile for the GPUs we name, and how many registers and spills does it take there?

No GPU is needed. The wrappers are called on CPU tensors with the shapes of a served model while launches are recorded instead of made,
so what is compiled is what would be launched. Answers go into docs/reference/kernel-resources.md and, with --check, nowhere.

    .venv/bin/python benchmarks/kernel_resources.py            # all targets, writes the page
    .venv/bin/python benchmarks/kernel_resources.py --check    # the same, exit 1 when a kernel does not compile
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specdec.kernels.dispatch import load
from specdec.kernels.paged_attention import shared_attention

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "kernel-resources.md"
VOCAB, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, BLOCK_SIZE = 151936, 16, 8, 128, 2048, 16
LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas")


@dataclass(frozen=True, slots=True)
class Launch:
    """One recorded launch: the kernel and how the compiler would see its arguments."""

    kernel: JITFunction
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]

    @property
    def name(self) -> str:
        """Kernel name and the compile-time choices that give it another body."""
        choices = [f"{key}={value}" for key, value in sorted(self.constants.items()) if key.startswith(("HAS_", "IS_", "IDS")) and value]
        return self.kernel.__name__.strip("_") + (f" [{', '.join(choices)}]" if choices else "")


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes: registers per thread, spilled bytes per thread (cuda) or registers (hip), shared bytes."""

    registers: int
    spills: int
    shared: int


@contextmanager
def recording(launches: list[Launch]) -> Iterator[None]:
    """Record launches in place of making them."""
    made = JITFunction.run

    def record(self: JITFunction, *args: Any, **kwargs: Any) -> None:
        del kwargs["grid"], kwargs["warmup"]
        options = {key: kwargs.pop(key) for key in LAUNCH_OPTIONS if key in kwargs}
        launches.append(describe(self, self.signature.bind(*args, **kwargs).arguments, options))

    JITFunction.run = record
    try:
        yield
    finally:
        JITFunction.run = made


def describe(kernel: JITFunction, arguments: dict[str, Any], options: dict[str, int]) -> Launch:
    """Give each argument the type, constness and alignment that a launch would give it."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        is_one = isinstance(value, int) and not isinstance(value, bool) and value == 1
        if parameter.is_constexpr or is_one:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = mangle_type(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return Launch(kernel, signature, constants, attributes, options)


def record_launches() -> list[Launch]:
    """Every kernel of the Triton column, once per compile-time choice that a served model makes."""
    launches: list[Launch] = []
    with recording(launches):
        for call in (sampling_calls, verification_calls, layer_calls, state_calls):
            call(lambda name, *args, **kwargs: load(name, "triton")(*args, **kwargs))
    unique: dict[str, Launch] = {}
    for launch in launches:
        unique.setdefault(launch.name, launch)
    return list(unique.values())


def sampling_calls(call: Callable[..., Any]) -> None:
    """Laws and draws of two rows."""
    logits, u = torch.zeros(2, VOCAB), torch.zeros(2)
    given = {"temperature": u, "top_k": torch.zeros(2, dtype=torch.int64), "top_p": u, "min_p": u}
    call("uniform", given["top_k"], given["top_k"], purpose=2, index=3)
    call("target_law", logits, **given)
    call("sample_logits", logits, u, **given)
    call("sample", logits, u)


def verification_calls(call: Callable[..., Any]) -> None:
    """Every rule on four requests of five drafts: certain drafts, laws over the vocabulary, over a map, over candidates."""
    requests, drafts, support = 4, 5, 8192
    rows = requests * (drafts + 1)
    probs, ids = torch.zeros(rows, VOCAB), torch.zeros(requests, drafts, dtype=torch.int64)
    names = {"seed": torch.zeros(requests, dtype=torch.int64), "position": torch.zeros(requests, dtype=torch.int64)}
    cu = {"cu_num_logits": torch.zeros(requests + 1, dtype=torch.int32)}
    laws = [
        {},
        {"draft_logits": torch.zeros(requests, drafts, VOCAB, dtype=torch.bfloat16)},
        {
            "draft_logits": torch.zeros(requests, drafts, support, dtype=torch.bfloat16),
            "draft_ids": torch.zeros(support, dtype=torch.int64),
        },
        {"draft_logits": torch.zeros(requests, drafts, 32), "draft_ids": torch.zeros(requests, drafts, 32, dtype=torch.int64)},
    ]
    for law in laws:
        for rule in ("rejection_sample", "block_verify", "fly"):
            call(rule, probs, ids, **cu, **names, **law)
    call("typical", probs, ids, **cu)
    targets = torch.zeros(rows, dtype=torch.int64)
    call("synthetic", targets, ids, **cu, **names, rates=torch.zeros(drafts))
    call("verify_coupled", targets, ids, **cu)
    call("verify_coupled", targets, ids, **cu, parents=ids)


def layer_calls(call: Callable[..., Any]) -> None:
    """Decoder operators in bfloat16; attention of two requests with drafts, whole and in shares."""
    x, weight = torch.zeros(12, HIDDEN, dtype=torch.bfloat16), torch.zeros(HIDDEN, dtype=torch.bfloat16)
    query = torch.zeros(12, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    fresh, angles = query[:, :KV_HEADS].contiguous(), torch.zeros(12, HEAD_DIM // 2)
    caches = [torch.zeros(9, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2)]
    call("rms_norm", x, weight, 1e-5)
    call("add_rms_norm", x, x, weight, 1e-5)
    call("rotate", query, angles, angles)
    call("silu_mul", torch.zeros(12, 2 * HIDDEN, dtype=torch.bfloat16))
    call("store_kv", fresh, fresh, *caches, torch.zeros(12, dtype=torch.int64))
    table = torch.zeros(2, 4, dtype=torch.int32)
    given = {"query_lens": (6, 6), "seq_lens": (64, 50), "block_table": table, "scale": HEAD_DIM**-0.5}
    tree = torch.zeros(12, 6, dtype=torch.bool)
    for option in ({}, {"is_causal": False}, {"window": 32}, {"tree_mask": tree}, {"tree_mask": tree, "window": 32}):
        call("paged_attention", query, *caches, **given, **option)
    for option in ({}, {"tree_mask": tree}):
        shared_attention(query, *caches, **given, **option, num_shares=4)


def state_calls(call: Callable[..., Any]) -> None:
    """Bookkeeping of four requests."""
    long, short = {"dtype": torch.int64}, {"dtype": torch.int32}
    four, bounds, drafts = torch.zeros(4, **long), torch.zeros(5, **short), torch.zeros(4, 5, **long)
    state = {"num_computed_tokens": torch.zeros(8, **long), "token_ids": torch.zeros(8, 4096, **short)}
    for parents in (None, drafts):
        call(
            "prepare_inputs", four, drafts, cu_query_lens=bounds, cu_num_logits=bounds, num_drafts=four, **state,
            block_table=torch.zeros(4, 256, **short), block_size=BLOCK_SIZE, num_query_rows=24, num_logits=24, parents=parents,
        )  # fmt: skip
    sampled = torch.zeros(4, 6, **long)
    call(
        "post_update", four, sampled, num_sampled=four, num_rejected=four, cu_query_lens=bounds, num_tokens=torch.zeros(8, **long), **state
    )
    caches = [torch.zeros(9, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2)]
    call("compact_kv", *caches, path=sampled, num_sampled=four, first_row=four, slot_mapping=torch.zeros(24, **long))
    lookup = {"token_ids": state["token_ids"], "num_tokens": torch.zeros(8, **long)}
    call("ngram_match", four, four, **lookup, shortest=2, longest=5, width=5)


def compile_for(launch: Launch, target: GPUTarget) -> Resources:
    """Compile one launch without a device and read its resources from the code object."""
    source = ASTSource(launch.kernel, launch.signature, constexprs=launch.constants, attrs=launch.attributes)
    compiled = triton.compile(source, target=target, options={"enable_fp_fusion": True, **launch.options})
    shared = int(compiled.metadata.shared)
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        return Resources(_number(r"\.vgpr_count:\s+(\d+)", text), _number(r"\.vgpr_spill_count:\s+(\d+)", text), shared)
    usage = _cuda_usage(compiled.asm["cubin"])
    return Resources(_number(r"REG:(\d+)", usage), _number(r"LOCAL:(\d+)", usage) + _number(r"STACK:(\d+)", usage), shared)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern} in the compiler's report: the toolchain of triton {triton.__version__} writes it differently")
    return int(found.group(1))


def _cuda_usage(cubin: bytes) -> str:
    """Resource report of a cubin by the cuobjdump that the triton wheel carries."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True).stdout


def table(results: dict[str, dict[str, Resources | str]]) -> str:
    """The page: one row per kernel, one column per target: registers / spills / shared bytes, or why not."""
    lines = [
        "# Kernel resources",
        "",
        f"Written by `benchmarks/kernel_resources.py` with triton {triton.__version__}; each kernel is compiled ahead of time.",
        "Each cell is registers per thread / spills / bytes of shared memory. Spills are bytes per thread for sm targets and",
        f"vector registers for gfx942. Shapes: vocabulary {VOCAB}, {HEADS} query and {KV_HEADS} KV heads of {HEAD_DIM}, bfloat16 weights.",
        "That a kernel compiles says nothing about its speed or its values; values are tested under Triton's interpreter.",
        "",
        "| kernel | " + " | ".join(TARGETS) + " |",
        "|---|" + "---|" * len(TARGETS),
    ]
    for name, cells in results.items():
        shown = [cell if isinstance(cell, str) else f"{cell.registers} / {cell.spills} / {cell.shared}" for cell in cells.values()]
        lines.append(f"| `{name}` | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def measure(launches: list[Launch], targets: dict[str, GPUTarget]) -> dict[str, dict[str, Resources | str]]:
    """Compile everything; a failure becomes the text of its cell."""
    results: dict[str, dict[str, Resources | str]] = {}
    for launch in launches:
        results[launch.name] = {}
        for target_name, target in targets.items():
            try:
                results[launch.name][target_name] = compile_for(launch, target)
            except Exception as error:
                results[launch.name][target_name] = f"does not compile: {type(error).__name__}"
                print(f"{launch.name} for {target_name}: {error}", file=sys.stderr)
        print(f"{launch.name}: {list(results[launch.name].values())}", file=sys.stderr)
    return results


def main(argv: list[str] | None = None) -> int:
    """Compile, print the table and one JSON line, and write the page unless --check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a kernel does not compile")
    options = parser.parse_args(argv)
    results = measure(record_launches(), TARGETS)
    failures = [f"{name} for {target}" for name, cells in results.items() for target, cell in cells.items() if isinstance(cell, str)]
    page = table(results)
    if not options.check:
        PAGE.write_text(page, encoding="utf-8")
    print(page)
    spilling = [name for name, cells in results.items() if any(isinstance(cell, Resources) and cell.spills for cell in cells.values())]
    print(
        json.dumps(
            {"triton": triton.__version__, "kernels": len(results), "targets": list(TARGETS), "failures": failures, "spilling": spilling}
        )
    )
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
