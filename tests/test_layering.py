"""Who may import whom. Every edge inside the package must be listed here, and some layers may not touch torch at import."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "specdec"
BASE = ("errors", "logging", "sampling_params")
L1 = (*BASE, "config")

# Module prefix -> prefixes it may import; the longest matching prefix decides. A layer may always import itself.
ALLOWED: dict[str, tuple[str, ...]] = {
    "errors": (),
    "logging": ("errors",),
    "sampling_params": ("errors",),
    "config": (*BASE, "models.source", "proposers.base"),  # resolve.py: finding files, and which methods exist
    "scheduler": L1,
    "kernels": (),
    "models": (*L1, "kernels"),
    "models.source": (*BASE, "config.engine"),
    "proposers": (*L1, "kernels", "models"),
    "proposers.base": L1,
    "structured": BASE,
    "worker": (*L1, "scheduler.output", "kernels", "models", "proposers.base", "structured"),
    "metrics": (*L1, "engine", "metrics.stats"),
    "metrics.stats": ("errors",),
    "engine": (*L1, "scheduler", "worker", "metrics.stats", "structured", "models.source"),  # self_test.py: hashes of weight files
    "server": (*L1, "engine", "metrics", "scheduler.output"),  # the records that EngineOutput is made of
    "tools": (*L1, "scheduler", "kernels", "models", "proposers", "worker", "metrics", "engine", "server", "train"),
    "integrations": (*L1, "scheduler", "kernels", "models", "proposers", "worker", "metrics", "engine", "server"),
    "train": (*L1, "kernels", "models"),
    "cli": (*L1, "scheduler", "kernels", "models", "proposers", "worker", "metrics", "engine", "server", "tools", "train", "integrations"),
    "__main__": ("cli",),
    "__init__": (),
}
# Layers that import nothing heavy when they are imported, and layers that never do, not even inside functions.
NO_TORCH_AT_IMPORT = (
    "errors",
    "logging",
    "sampling_params",
    "config",
    "models.source",
    "proposers.base",
    "metrics.stats",
    "cli",
    "server.protocol",
)
NO_ARRAYS_ANYWHERE = ("errors", "logging", "sampling_params", "scheduler")
KERNEL_LIBRARIES = {"torch", "numpy", "triton", "numba", "llvmlite"}  # llvmlite is what numba is made of
HEAVY = {"torch", "numpy", "triton", "transformers", "numba", "safetensors"}


def modules() -> dict[str, ast.Module]:
    """Return dotted name below the package -> syntax tree, for every module."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__" and len(parts) > 1:
            parts.pop()
        found[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def imports(tree: ast.AST, *, inside_functions: bool) -> set[str]:
    """Return the absolute modules that a tree imports at run time (blocks under TYPE_CHECKING are for the reader)."""
    names: set[str] = set()
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if is_type_checking(node):
            stack.extend(node.orelse)
            continue
        if not inside_functions and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module} at line {node.lineno}"
            names.update({f"{node.module}.{alias.name}" for alias in node.names} if node.module else ())
        stack.extend(ast.iter_child_nodes(node))
    return names


def covers(prefixes: tuple[str, ...], name: str) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def rule_of(module: str) -> str:
    return max((prefix for prefix in ALLOWED if covers((prefix,), module)), key=len, default="")


def inner_edges(tree: ast.AST) -> set[str]:
    """Return what a module imports from specdec, without the package name; `from specdec import x` counts as x."""
    return {name.removeprefix("specdec.") for name in imports(tree, inside_functions=True) if name.startswith("specdec.")}


MODULES = modules()


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_layers(module: str) -> None:
    rule = rule_of(module)
    assert rule, f"specdec.{module} belongs to no layer; add it to ALLOWED with what it may import"
    for edge in inner_edges(MODULES[module]):
        if edge == "__version__":
            continue
        own_folder = covers((rule.split(".")[0],), edge) and "." not in rule
        assert own_folder or covers(ALLOWED[rule], edge), f"{module} imports {edge}; layer {rule} may import {ALLOWED[rule]}"


@pytest.mark.parametrize("module", [m for m in MODULES if covers(NO_TORCH_AT_IMPORT, m)])
def test_light_layers_import_nothing_heavy_at_module_level(module: str) -> None:
    found = {name.split(".")[0] for name in imports(MODULES[module], inside_functions=False)} & HEAVY
    assert not found, f"specdec.{module} imports {found} when it is imported"


@pytest.mark.parametrize("module", [m for m in MODULES if covers(NO_ARRAYS_ANYWHERE, m)])
def test_the_scheduler_knows_no_tensors(module: str) -> None:
    found = {name.split(".")[0] for name in imports(MODULES[module], inside_functions=True)} & HEAVY
    assert not found, f"specdec.{module} imports {found}"


@pytest.mark.parametrize("module", [m for m in MODULES if covers(("kernels",), m)])
def test_kernels_import_only_array_libraries(module: str) -> None:
    outside = {name.split(".")[0] for name in imports(MODULES[module], inside_functions=True)}
    allowed = KERNEL_LIBRARIES | set(sys.stdlib_module_names) | {"specdec"}
    assert outside <= allowed, f"specdec.{module} imports {outside - allowed}"


@pytest.mark.parametrize("module", [m for m in MODULES if not covers(("cli", "tools"), m)])
def test_only_the_command_line_imports_tools(module: str) -> None:
    assert not {edge for edge in inner_edges(MODULES[module]) if covers(("tools",), edge)}


def test_the_rules_catch_a_forbidden_edge() -> None:
    tree = ast.parse("def late():\n    from specdec.scheduler.scheduler import Scheduler\n    return Scheduler")
    assert inner_edges(tree) == {"scheduler.scheduler.Scheduler"}
    assert not covers(ALLOWED["worker"], "scheduler.scheduler.Scheduler")
    assert covers(ALLOWED["worker"], "scheduler.output.SchedulerOutput")
    assert imports(tree, inside_functions=False) == set()


def test_imports_for_type_checkers_do_not_count() -> None:
    tree = ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import json")
    assert imports(tree, inside_functions=True) == {"typing.TYPE_CHECKING", "json"}
