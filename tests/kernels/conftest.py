"""How a test calls the Triton column: compiled where there is a CUDA device, else interpreted in a child process.

Triton fixes at import time whether it compiles or interprets, for its own library too. A child that is started with
TRITON_INTERPRET=1 therefore interprets, and this process never does, in whatever order tests run.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import pytest
import torch

Call = Callable[..., Any]


def call_in_child(payload: bytes) -> bytes:
    """Call one kernel of the Triton column; return its result and the arguments as the call left them."""
    name, args, kwargs = pickle.loads(payload)
    result = triton_kernel(name)(*args, **kwargs)
    return pickle.dumps((result, args, kwargs))


def triton_kernel(name: str) -> Call:
    """A kernel of the Triton column by name, or "module:function" for one that the dispatcher does not offer."""
    from specdec.kernels.dispatch import load

    module, _, function = name.partition(":")
    return getattr(import_module(f"specdec.kernels.{module}"), function) if function else load(name, "triton")


def on_device(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def write_back(originals: list[Any], changed: list[Any]) -> None:
    """In-place kernels change their arguments: make the caller's tensors look as if they had run here."""
    for original, new in zip(originals, changed, strict=True):
        if isinstance(original, torch.Tensor):
            original.copy_(new)


def from_device(result: Any) -> Any:
    if isinstance(result, tuple):
        items = [on_device(item, "cpu") for item in result]
        return type(result)(*items) if hasattr(result, "_fields") else tuple(items)
    return on_device(result, "cpu")


def compiled(name: str, *args: Any, **kwargs: Any) -> Any:
    device_args = [on_device(arg, "cuda") for arg in args]
    device_kwargs = {key: on_device(value, "cuda") for key, value in kwargs.items()}
    result = triton_kernel(name)(*device_args, **device_kwargs)
    write_back([*args, *kwargs.values()], [*device_args, *device_kwargs.values()])
    return from_device(result)


@pytest.fixture(scope="session")
def triton_call() -> Iterator[Call]:
    """triton_call(name, *args, **kwargs) runs a kernel of the Triton column on CPU tensors and returns its result."""
    if torch.cuda.is_available():
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default of today, said aloud so that Triton does not warn
        yield compiled
        return
    pytest.importorskip("triton")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    try:
        pool.submit(int).result()  # the child has its environment now
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before

    def interpreted(name: str, *args: Any, **kwargs: Any) -> Any:
        answer = pool.submit(call_in_child, pickle.dumps((name, args, kwargs))).result()
        result, args_after, kwargs_after = pickle.loads(answer)
        write_back([*args, *kwargs.values()], [*args_after, *kwargs_after.values()])
        return result

    with pool:
        yield interpreted


@pytest.fixture(params=["cpu", "triton"])
def served_call(request: pytest.FixtureRequest) -> Call:
    """served_call(name, *args, **kwargs) runs the CPU column here, or the Triton column as `triton_call` does."""
    if request.param == "triton":
        triton: Call = request.getfixturevalue("triton_call")
        return triton
    from specdec.kernels.dispatch import load

    return lambda name, *args, **kwargs: load(name, "cpu")(*args, **kwargs)


@pytest.fixture
def reference_call() -> Call:
    """reference_call(name, *args, **kwargs) runs the oracle of a kernel."""
    from specdec.kernels.dispatch import load

    return lambda name, *args, **kwargs: load(name, "reference")(*args, **kwargs)
