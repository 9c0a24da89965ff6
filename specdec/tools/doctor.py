"""specdec doctor: what this machine offers, in one page that fits a bug report.

Owns: looking. Must not know: how any of it is used. Changes nothing and downloads nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

from specdec import __version__
from specdec.errors import ConfigError

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "numba",
    "pydantic",
    "fastapi",
    "uvicorn",
    "xgrammar",
    "gguf",
)


def report() -> str:
    """Return the report as lines of `name: value`. Never raises: what cannot be found out is said in its line."""
    rows = [
        ("specdec", __version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("cores", _cores()),
        ("memory", _memory()),
        *((name, _version(name)) for name in PACKAGES),
        *_torch_rows(),
        ("embedded model", _embedded()),
        ("SPECDEC_KERNELS", os.environ.get("SPECDEC_KERNELS", "not set")),
        ("SPECDEC_LOG_LEVEL", os.environ.get("SPECDEC_LOG_LEVEL", "not set")),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{usable} usable of {os.cpu_count()}"


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    except (ValueError, OSError, AttributeError):
        return "not known"


def _torch_rows() -> list[tuple[str, str]]:
    """Return device, threads, dtype path and kernels column; one line with the reason where torch cannot be imported."""
    try:
        import torch
    except Exception as error:  # a broken install raises OSError, RuntimeError and others
        return [("device", f"not known: torch cannot be imported ({error})")]
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        name, memory = torch.cuda.get_device_name(index), torch.cuda.get_device_properties(index).total_memory
        capability = ".".join(str(part) for part in torch.cuda.get_device_capability(index))
        device = [("device", f"cuda: {name}, compute capability {capability}, {memory / 2**30:.0f} GiB")]
    else:
        device = [("device", f"cpu: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")]
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return [*device, ("dtype", _dtype(kind)), ("kernels", _kernels(kind))]


def _dtype(kind: str) -> str:
    """Return which of packed bf16, bf16 and fp32 the linears of the target take here under --dtype auto."""
    from specdec.config.resolve import probe_dtype
    from specdec.models.linear import packs_bf16

    chosen = str(probe_dtype(kind)).removeprefix("torch.")
    return "packed bfloat16" if chosen == "bfloat16" and kind == "cpu" and packs_bf16() else chosen


def _kernels(kind: str) -> str:
    if os.environ.get("SPECDEC_KERNELS") == "reference":
        return "reference (SPECDEC_KERNELS)"
    return "triton" if kind == "cuda" else "cpu"


def _embedded() -> str:
    from specdec.models.source import MANIFEST, cache_dir, embedded_gguf

    try:
        path = embedded_gguf()
    except ConfigError as error:
        return f"missing; {error.hint}"
    manifests = (cache_dir() / "gguf").glob(f"*/{MANIFEST}")
    converted = [manifest.parent for manifest in manifests if f'"{path.name}"' in manifest.read_text(encoding="utf-8")]
    state = f"converted in {converted[0]}" if converted else "not converted yet; the first start does it, once"
    return f"{path.name}, {path.stat().st_size / 1e6:.0f} MB, {state}"
