"""Every Triton kernel compiles without a device for the GPUs we name, spills nothing, and stands in the page of resources."""

from __future__ import annotations

import os
import re

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("this process interprets Triton, so nothing can be compiled in it", allow_module_level=True)

from benchmarks.kernel_resources import PAGE, TARGETS, Launch, compile_for, record_launches

LAUNCHES = {launch.name: launch for launch in record_launches()}
# The quick form: one kernel of each kind (cuts, residual scatter, matrix units with a mask) on one target.
QUICK = ("sample_logits_kernel", "subtract_draft_kernel [IDS=1]", "paged_attention_kernel [HAS_TREE=True, IS_CAUSAL=True]")


def assert_compiles(launch: Launch, target: str) -> None:
    resources = compile_for(launch, TARGETS[target])
    assert resources.registers > 0
    assert resources.spills == 0
    assert resources.shared <= 64 * 1024  # what a workgroup of gfx942 has, the least of the four


@pytest.mark.parametrize("name", QUICK)
def test_one_kernel_of_each_kind_compiles(name: str) -> None:
    assert_compiles(LAUNCHES[name], "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", LAUNCHES)
def test_every_kernel_compiles_for_every_target(name: str, target: str) -> None:
    assert_compiles(LAUNCHES[name], target)


def test_every_kernel_file_is_recorded() -> None:
    """A kernel that no recorded call launches would never be compiled here."""
    kernels = {launch.kernel.__name__ for launch in LAUNCHES.values()}
    written = set()
    for path in (PAGE.parents[2] / "specdec" / "kernels").glob("*.py"):
        written |= set(re.findall(r"^def (_\w+_kernel)\(", path.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert kernels == written


def test_the_page_lists_every_kernel_and_target() -> None:
    rows = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(rows) == set(LAUNCHES), "run benchmarks/kernel_resources.py"
    assert all(len(cells.split(" | ")) == len(TARGETS) for cells in rows.values())
    assert not [name for name, cells in rows.items() if "does not compile" in cells]
