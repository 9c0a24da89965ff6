"""LangChain's client, which people put before OpenAI-compatible servers. Skipped, with a word, where it is not installed."""

from __future__ import annotations

import pytest

from tests.server.serving import Served

QUESTION, RENDERED = "Hello there", "user: Hello there assistant: "


def test_langchain_asks_streams_and_counts(served: Served) -> None:
    openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: LangChain is NOT tested here")
    chat = openai.ChatOpenAI(base_url=f"{served.url}/v1", api_key="none", model="toy", max_tokens=20, temperature=0, stream_usage=True)
    answer = chat.invoke(QUESTION)
    assert answer.content == served.solo_text(RENDERED, 20)
    assert answer.usage_metadata["output_tokens"] > 0
    chunks = list(chat.stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    counted = [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata]
    assert sum(counted) == answer.usage_metadata["output_tokens"]
