"""The server runs the self-test of its draft heads beside requests: it is ready before, and stops in the middle of it."""

from __future__ import annotations

import asyncio

import pytest

from specdec.engine.self_test import SelfTest
from tests.server.serving import serving


def test_a_server_is_ready_while_its_heads_are_tested_and_stops_it_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def endless(self: SelfTest) -> None:
        seen.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("stopped")

    monkeypatch.setattr(SelfTest, "run", endless)
    with serving() as served:
        assert served.get("/health").status_code == 200
        assert served.post("/v1/completions", {"prompt": "hello", "max_tokens": 3}).status_code == 200
        assert seen == ["begun"]
    assert seen == ["begun", "stopped"]
