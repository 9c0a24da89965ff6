"""Fixtures of the server tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.serving import Served, serving


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """One server for all tests that leave it as they found it."""
    with serving() as running:
        yield running
