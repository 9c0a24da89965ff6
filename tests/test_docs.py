"""Pages hold what they promise: links lead somewhere, and files named in the architecture exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


def test_files_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:specdec/)?((?:config|scheduler|worker|kernels|models|proposers|engine|server|metrics)/\w+\.py)`", text))
    assert len(named) >= 12
    assert [name for name in sorted(named) if not (ROOT / "specdec" / name).exists()] == []


def test_scripts_start_from_any_folder_and_are_executable() -> None:
    for name in ("scripts/install", "scripts/serve", "scripts/test", "scripts/check", "scripts/size", ".ci/run"):
        path = ROOT / name
        assert path.stat().st_mode & 0o111, f"{name} is not executable"
        text = path.read_text(encoding="utf-8")
        assert "BASH_SOURCE" in text or "__file__" in text, f"{name} depends on the current folder"
