"""The generated pages of docs/reference say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.config.fields import SpeculativeBase
from specdec.config.speculative import MODELS
from specdec.tools.reference import config_page, http_page, server_document

PAGES = Path(__file__).resolve().parents[1] / "docs" / "reference"


@pytest.mark.parametrize("name", ["config.md", "http-api.md"])
def test_a_generated_page_is_current(name: str) -> None:
    fresh = config_page(MODELS, SpeculativeBase) if name == "config.md" else http_page(server_document())
    assert (PAGES / name).read_text(encoding="utf-8") == fresh, "run python -m specdec.tools.reference"


def test_every_key_of_every_method_has_a_row() -> None:
    page = config_page(MODELS, SpeculativeBase)
    for method, model in MODELS.items():
        assert f"## `{method}`" in page
        assert all(f"| `{name}` |" in page for name in model.model_fields if name != "method")


def test_every_route_is_listed() -> None:
    document = server_document()
    page = http_page(document)
    for path, verbs in document["paths"].items():
        assert all(f"| `{verb.upper()} {path}` |" in page for verb in verbs)


def test_every_key_of_every_body_is_described() -> None:
    silent = [line for line in http_page(server_document()).splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert silent == []
