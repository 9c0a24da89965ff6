"""Corpora over HTTP: added, listed, replaced and removed, each key for itself, and what cannot be is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdec.proposers import corpora
from specdec.proposers.corpora import CorpusShelf
from specdec.server.options import ServerOptions
from tests.server.serving import Served, serving

KEYS = ("key-one", "key-two")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(options=ServerOptions(api_keys=KEYS)) as one:
        one.runner.corpora = CorpusShelf(16)
        yield one


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_corpus_comes_is_listed_replaced_and_goes(served: Served) -> None:
    first = served.post("/v1/corpora", {"name": "letters", "texts": ["abc abc", "b a"]}, **bearer(KEYS[0]))
    assert first.status_code == 201, first.text
    assert first.json()["num_texts"] == 2
    assert first.json()["num_tokens"] > 3
    replaced = served.post("/v1/corpora", {"name": "letters", "token_ids": [[1, 2, 3]]}, **bearer(KEYS[0])).json()
    assert (replaced["num_texts"], replaced["num_tokens"]) == (1, 3)
    listed = served.get("/v1/corpora", **bearer(KEYS[0])).json()
    assert [one["id"] for one in listed["data"]] == ["letters"]
    assert served.get("/v1/corpora/letters", **bearer(KEYS[0])).json() == replaced
    assert served.get("/v1/corpora", **bearer(KEYS[1])).json()["data"] == []  # the other key sees nothing
    assert served.http.delete(served.url + "/v1/corpora/letters", headers=bearer(KEYS[1])).status_code == 404
    gone = served.http.delete(served.url + "/v1/corpora/letters", headers=bearer(KEYS[0]))
    assert gone.json() == {"id": "letters", "object": "corpus", "deleted": True}
    assert served.get("/v1/corpora/letters", **bearer(KEYS[0])).status_code == 404


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"name": "a/b", "texts": ["x"]}, "name"),
        ({"name": "a"}, "texts or token_ids"),
        ({"name": "a", "texts": ["x"], "token_ids": [[1]]}, "texts or token_ids"),
        ({"name": "a", "texts": []}, "no token"),
        ({"name": "a", "token_ids": [[1, 10**9]]}, "token_ids holds 1000000000"),
        ({"name": "a", "texts": ["x"], "tenant": "b"}, "tenant"),
    ],
)
def test_what_cannot_be_is_refused(served: Served, body: dict[str, object], word: str) -> None:
    answer = served.post("/v1/corpora", body, **bearer(KEYS[0]))
    assert answer.status_code == 400, answer.text
    assert word in answer.json()["error"]["message"]


def test_names_and_memory_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "MAX_NAMES", 2)
    shelf = CorpusShelf(8)
    for name in ("a", "b"):
        shelf.add("", name, [[1, 2, 3]])
    shelf.add("", "b", [[4, 5, 6]])  # a replacement needs no new place
    with pytest.raises(corpora.RequestRejected, match="2 corpora already"):
        shelf.add("", "c", [[1, 2]])
    small = CorpusShelf(8, max_bytes=shelf.num_bytes)
    with pytest.raises(corpora.RequestRejected, match="bytes of memory"):
        small.add("", "a", [list(range(5000))])
    assert small.num_bytes == 0


def test_a_server_without_suffix_says_so() -> None:
    with serving() as plain:
        answer = plain.get("/v1/corpora")
    assert answer.status_code == 404
    assert "method suffix" in answer.json()["error"]["message"]
