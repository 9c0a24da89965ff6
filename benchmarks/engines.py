"""The engines that compare.py sets side by side: how each is started on the same weights, at its best for this use.

Owns: their command lines. Must not know: loads or figures.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.arms import Arm, parse_arm

MAX_LEN = 2048  # tokens of prompt and answer; the longest prompt that is measured has about 300
VLLM_LOOKUP = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
# Its defaults look for 12 tokens and draft 48, which is more than a CPU verifies for nothing.
LLAMA_LOOKUP = (
    "--spec-type",
    "ngram-simple",
    "--spec-ngram-simple-size-n",
    "4",
    "--spec-ngram-simple-size-m",
    "8",
    "--spec-draft-n-max",
    "8",
)


@dataclass(frozen=True, slots=True)
class Engine:
    """One row of the table. weights: the precision they have in memory. drafts: how it speculates, or nothing."""

    arm: Arm
    weights: str
    drafts: str = ""


def ours() -> list[Engine]:
    """Return this engine without and with its default drafting; the first is what ratios are taken to."""
    off = "--no-enable-prefix-caching --no-ui"
    return [
        Engine(parse_arm(f"specdec, plain={off} --no-speculation", ""), "bf16"),
        Engine(parse_arm(f"specdec={off}", ""), "bf16", "default"),
    ]


def transformers(model: str) -> list[Engine]:
    """Return `transformers serve` of this environment, with continuous batching."""
    program = str(Path(sys.executable).with_name("transformers"))
    return [
        _other("transformers", [program, "serve", model, "--device", "cpu", "--dtype", "bfloat16", "--continuous-batching"], "bf16"),
    ]


def vllm(environment: Path, model: str) -> list[Engine]:
    """Return vLLM's CPU build of an environment made by scripts/install-vllm, without and with its n-gram lookup."""
    # Not `vllm serve`: the CPU build has another package name than the one whose version that command asks for.
    program = [str(environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    serve = [*program, "--model", model, "--dtype", "bfloat16", "--max-model-len", str(MAX_LEN)]
    serve += ["--no-enable-prefix-caching", "--max-num-seqs", "64", "--gpu-memory-utilization", "0.4"]  # of the memory, on a CPU
    return [
        _other("vLLM", serve, "bf16"),
        _other("vLLM, n-gram", [*serve, "--speculative-config", json.dumps(VLLM_LOOKUP)], "bf16", "n-gram lookup"),
    ]


def llama_cpp(program: Path, gguf: Path, weights: str, *, slots: int) -> list[Engine]:
    """Return llama.cpp's server on a GGUF file, without and with its n-gram lookup; slots: requests in flight, MAX_LEN tokens each."""
    serve = [str(program), "-m", str(gguf), "-c", str(MAX_LEN * slots), "-np", str(slots), "-t", str(_num_cores())]
    serve += ["--no-cache-prompt", "--cache-ram", "0", "--no-webui"]
    if weights == "Q4_1":
        serve.append("--no-repack")  # its AMX kernel for this format ends the process with an illegal instruction; it has no other packing
    return [
        _other(f"llama.cpp {weights}", serve, weights),
        _other(f"llama.cpp {weights}, n-gram", [*serve, *LLAMA_LOOKUP], weights, "n-gram lookup"),
    ]


def _other(label: str, command: Sequence[str], weights: str, drafts: str = "") -> Engine:
    return Engine(parse_arm(f"{label}=@{shlex.join(command)}", ""), weights, drafts)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
