"""load_backend: another implementation of paged_attention than the device's own, by name.

Owns: the table of backends. Must not know: models. Semantics: reference_layers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

Attend: TypeAlias = Callable[..., Any]  # the signature of reference_layers.paged_attention

OWN = ("auto", "triton")  # what the dispatcher gives a GPU anyway
BACKENDS = {"sdpa": "specdec.kernels.attention.sdpa", "flashinfer": "specdec.kernels.attention.flashinfer"}


def load_backend(name: str) -> Attend | None:
    """Return a backend's paged_attention, None for the device's own. The configuration has refused what is not installed.

    Raises:
        ValueError: no such backend.
    """
    if name in OWN:
        return None
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}: choose one of {sorted((*OWN, *BACKENDS))}")
    make: Callable[[], Attend] = import_module(BACKENDS[name]).make_backend
    return make()
