"""What single events hold: whole characters, aligned lists, nothing empty; and failures nobody foresaw."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from specdec.engine.types import SpecDecodeRequestStats
from specdec.server.generation import Collected
from specdec.server.logprobs import TokenTexts, completion_logprobs
from specdec.server.usage import response_metrics
from tests.engine.tokenizers_for_tests import ids_of
from tests.server.serving import Served, served_tokenizer, serving
from tests.toy import scripted_target

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


def _events(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in served.post(path, body | {"stream": True}).text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_characters_split_over_tokens_arrive_whole() -> None:
    text = 'a🎉b "q" \\ 🎉🎉'
    with serving(target=scripted_target(ids_of(text))) as served:
        body = {"prompt": "x", "max_tokens": len(ids_of(text)), "ignore_eos": True}
        pieces = [event["choices"][0]["text"] for event in _events(served, COMPLETION, body)]
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)
        scored = served.post(COMPLETION, body | {"logprobs": 1}).json()["choices"][0]["logprobs"]
        assert "bytes:\\xf0" in scored["tokens"]
        chat = served.post(CHAT, {"messages": [{"role": "user", "content": "x"}], "logprobs": True} | {"max_tokens": 5}).json()
        entries = chat["choices"][0]["logprobs"]["content"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "a🎉"


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_events_hold_several_tokens_and_are_never_empty(served: Served, path: str) -> None:
    prompt = {"prompt": "x"} if path == COMPLETION else {"messages": [{"role": "user", "content": "x"}]}
    events = _events(served, path, prompt | {"max_tokens": 60, "ignore_eos": True, "return_token_ids": True})
    counts = [len(event["choices"][0].get("token_ids", ())) for event in events]
    assert sum(counts) == 60
    assert max(counts) > 1
    plain = _events(served, path, prompt | {"max_tokens": 60, "ignore_eos": True})
    texts = [event["choices"][0].get("text", event["choices"][0].get("delta", {}).get("content")) for event in plain]
    assert all(texts[1:-1])
    prompt_ids = events[0]["prompt_token_ids"] if path == CHAT else events[0]["choices"][0]["prompt_token_ids"]
    assert served.tokenizer.decode(prompt_ids).strip().endswith("x" if path == COMPLETION else "assistant:")


def test_the_hot_path_and_the_full_one_show_the_same(served: Served) -> None:
    body = {"prompt": "twice", "max_tokens": 50, "ignore_eos": True, "request_id": "same"}
    hot = _events(served, COMPLETION, body)
    full = _events(served, COMPLETION, body | {"stream_options": {"include_usage": True}})

    def shape(events: list[dict[str, Any]]) -> tuple[str, set[tuple[str, ...]]]:
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        return text, {tuple(choice) for event in events for choice in event["choices"]}

    assert shape(hot) == shape(full)
    assert {event["id"] for event in hot} == {event["id"] for event in full} == {"cmpl-same"}


def test_a_text_that_ends_in_a_stop_is_not_shown_beyond_it(served: Served) -> None:
    full = served.solo_text("hold back", 40, ignore_eos=True)
    stop = full[15:19]
    events = _events(served, COMPLETION, {"prompt": "hold back", "max_tokens": 40, "stop": stop, "ignore_eos": True})
    assert "".join(event["choices"][0]["text"] for event in events) == full[: full.index(stop)]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"][0]["stop_reason"] == stop


def test_seeds_of_choices_follow_one_another(served: Served) -> None:
    before = len(served.runner.plans)
    served.post(COMPLETION, {"prompt": ["a", "b"], "n": 2, "seed": 2**64 - 1, "max_tokens": 2})
    seeds = {new.request_id.rsplit("-", 1)[1]: new.sampling.seed for plan in served.runner.plans[before:] for new in plan.new}
    assert seeds == {"0": 2**64 - 1, "1": 0, "2": 2**64 - 1, "3": 0}


def test_an_unforeseen_error_is_500_without_details_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as served:

        def fail(*_: object, **__: object) -> None:
            raise ZeroDivisionError("secret internals")

        served.tokenizer.encode = fail  # type: ignore[method-assign]
        with caplog.at_level(logging.ERROR):
            answer = served.post(COMPLETION, {"prompt": "abc"})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "secret" not in answer.text
        assert "Traceback" not in answer.text
        assert any(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in caplog.records)
        assert served.post(COMPLETION, {"prompt": [1, 2]}).status_code == 200


def test_offsets_run_on_over_calls() -> None:
    from specdec.scheduler.output import TokenLogprobs

    tokenizer = served_tokenizer()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("abcd")
    entries = [TokenLogprobs(token_id, float("-inf"), 1) for token_id in ids]
    first, offset = completion_logprobs(ids[:2], entries[:2], tokens=texts, text_offset=7)
    second, end = completion_logprobs(ids[2:], entries[2:], tokens=texts, text_offset=offset)
    assert first["text_offset"] + second["text_offset"] == [7, 8, 9, 10]
    assert end == 11
    assert first["token_logprobs"] == [-9999.0, -9999.0], "JSON has no infinity"


def test_the_histogram_counts_steps_by_accepted_drafts() -> None:
    """Steps that accepted 0, 1, 1, 3 of at most 3 drafts."""
    stats = SpecDecodeRequestStats(num_drafts=4, num_draft_tokens=12, num_accepted_tokens=5, accepted_per_pos=[3, 1, 1])
    metrics = response_metrics([Collected(stats=stats)], "summary", max_nodes=3)
    assert metrics is not None
    assert metrics["speculative_decoding"]["acceptance_histogram"] == [1, 2, 0, 1]
    assert metrics["speculative_decoding"]["mean_acceptance_length"] == 2.25
    assert response_metrics([Collected(stats=stats)] * 2, "summary", max_nodes=3) == {"speculative_decoding": None}
    assert response_metrics([Collected(stats=stats)], "none", max_nodes=3) is None


def test_a_server_without_speculation_serves_and_says_so() -> None:
    with serving(num_drafts=0) as served:
        body = {"prompt": "abc", "max_tokens": 10, "per_request_spec_decode_metrics": "summary"}
        answer = served.post(COMPLETION, body | {"speculative": {"enabled": False}}).json()
        assert answer["metrics"]["speculative_decoding"]["acceptance_histogram"] == [0]
        refused = served.post(COMPLETION, body | {"speculative": {"num_speculative_tokens": 2}})
        assert "without speculation" in refused.json()["error"]["message"]
        assert served.get("/health").json()["speculation"] is None
        assert 'specdec_num_drafts_total{model_name="toy"} 0.0' in served.get("/metrics").text
