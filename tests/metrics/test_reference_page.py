"""docs/reference/metrics.md names every metric that is exported under our names, with its type, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from specdec.metrics.prometheus import own_rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"


def test_the_page_and_the_exporter_agree() -> None:
    page = PAGE.read_text(encoding="utf-8")
    written = set(re.findall(r"^\| `(specdec_\w+)` \| (\w+) \| `?(\w*)`?", page, flags=re.MULTILINE))
    exported = {(row.name + ("_total" if row.kind == "counter" else ""), row.kind, row.label or "") for row in own_rows(4)}
    assert written == exported
