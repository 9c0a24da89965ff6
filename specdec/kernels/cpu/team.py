"""Team: runs compiled code on the OpenMP threads torch already owns.

Owns: the library handle and the two symbols compiled code calls (thread number, team size). A second thread pool would fight
torch's spinning workers for the same cores. Must not know: what runs.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

_XFEATURE_TILE_DATA, _ARCH_REQ_XCOMP_PERM, _SYS_ARCH_PRCTL = 18, 0x1023, 158


@cache
def openmp() -> ctypes.CDLL | None:
    """Return torch's OpenMP runtime with GNU entry points, or None where torch has none (macOS, Windows)."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not found:
        return None
    library = ctypes.CDLL(str(found[0]))
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    library.GOMP_parallel.restype = None
    return library


@cache
def register_symbols() -> bool:
    """Tell LLVM where a thread asks for its number and the team's size; False without an OpenMP runtime."""
    import llvmlite.binding as llvm

    library = openmp()
    if library is None:
        return False
    for name, function in (("specdec_thread_num", library.omp_get_thread_num), ("specdec_team_size", library.omp_get_num_threads)):
        llvm.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    return True


@cache
def has_amx() -> bool:
    """True when this process may use AMX bf16 tiles: the CPU has them and the kernel grants the state."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    if "amx_bf16" not in flags or "amx_tile" not in flags or not register_symbols():
        return False
    return ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_TILE_DATA) == 0


@cache
def has_amx_int8() -> bool:
    """True when this process may use AMX int8 tiles too."""
    return has_amx() and "amx_int8" in Path("/proc/cpuinfo").read_text()


def run(function: int, arguments: int, num_threads: int) -> None:
    """Run function(arguments) (both addresses) on every thread of the team and wait. The GIL is free meanwhile."""
    library = openmp()
    assert library is not None, "run() needs the OpenMP runtime that register_symbols() found"
    library.GOMP_parallel(function, arguments, num_threads, 0)
