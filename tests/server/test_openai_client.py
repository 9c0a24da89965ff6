"""The official client against a running server, whole answers and streams."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.server.serving import Served

MESSAGES = [{"role": "user", "content": "Hello there"}]
RENDERED = "user: Hello there assistant: "


def test_a_completion_is_what_the_target_says(served: Served) -> None:
    answer = served.client.completions.create(model="toy", prompt="abc", max_tokens=20)
    assert answer.choices[0].text == served.solo_text("abc", 20)
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.total_tokens == 3 + answer.usage.completion_tokens


def test_a_chat_answer_is_what_the_target_says(served: Served) -> None:
    answer = served.client.chat.completions.create(model="toy", messages=MESSAGES, max_completion_tokens=20)
    assert answer.choices[0].message.content == served.solo_text(RENDERED, 20)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_streamed_completion_adds_up_to_the_whole_one(served: Served, logprobs: int | None) -> None:
    arguments = {"model": "toy", "prompt": "stream me", "max_tokens": 40, "logprobs": logprobs, "extra_body": {"ignore_eos": True}}
    whole = served.client.completions.create(**arguments).choices[0]
    chunks = [chunk.choices[0] for chunk in served.client.completions.create(stream=True, **arguments)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]
    if logprobs is not None:
        assert whole.logprobs is not None
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [item for chunk in chunks for item in getattr(chunk.logprobs, name)] == getattr(whole.logprobs, name)
        assert len(whole.logprobs.tokens) == 40
        assert len(chunks) < 40, "accepted drafts come several to an event"


def test_a_streamed_chat_adds_up_to_the_whole_one(served: Served) -> None:
    arguments = {"model": "toy", "messages": MESSAGES, "max_tokens": 30, "logprobs": True, "top_logprobs": 3}
    whole = served.client.chat.completions.create(**arguments)
    chunks = list(served.client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **arguments))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content
    assert deltas[-1].finish_reason == whole.choices[0].finish_reason
    entries = [entry for choice in deltas if choice.logprobs for entry in choice.logprobs.content or ()]
    assert whole.choices[0].logprobs is not None
    assert entries == whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    joined = b"".join(bytes(entry.bytes or ()) for entry in entries).decode(errors="replace")
    assert joined.removesuffix("<eos>") == whole.choices[0].message.content


def test_choices_keep_apart_in_one_stream(served: Served) -> None:
    prompts = ["first", "second one", "third!"]
    arguments = {"model": "toy", "prompt": prompts, "max_tokens": 25, "n": 2, "seed": 5, "extra_body": {"return_token_ids": True}}
    whole = served.client.completions.create(**arguments)
    assert [choice.index for choice in whole.choices] == list(range(6))
    texts = [""] * 6
    for chunk in served.client.completions.create(stream=True, **arguments):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert texts[::2] == [served.solo_text(prompt, 25) for prompt in prompts]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == sum(len(served.tokenizer.encode(prompt)) for prompt in prompts)
    assert whole.usage.completion_tokens == sum(len(choice.token_ids) for choice in whole.choices)


def test_prompts_may_be_token_ids(served: Served) -> None:
    ids = [list(served.tokenizer.encode(text)) for text in ("abc", "xyz")]
    by_text = served.client.completions.create(model="toy", prompt=["abc", "xyz"], max_tokens=10)
    by_ids = served.client.completions.create(model="toy", prompt=ids, max_tokens=10)
    alone = served.client.completions.create(model="toy", prompt=ids[1], max_tokens=10)
    assert [choice.text for choice in by_ids.choices] == [choice.text for choice in by_text.choices]
    assert alone.choices[0].text == by_text.choices[1].text


def test_echo_scores_the_prompt(served: Served) -> None:
    answer = served.client.completions.create(model="toy", prompt="score", max_tokens=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "score"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == list("score")
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_echo_precedes_the_answer_in_a_stream(served: Served) -> None:
    arguments = {"model": "toy", "prompt": "score", "max_tokens": 12, "echo": True, "logprobs": 1}
    whole = served.client.completions.create(**arguments).choices[0]
    chunks = [chunk.choices[0] for chunk in served.client.completions.create(stream=True, **arguments)]
    assert whole.text == "score" + served.solo_text("score", 12)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert whole.logprobs is not None
    assert [offset for chunk in chunks for offset in chunk.logprobs.text_offset] == whole.logprobs.text_offset


def test_best_of_shows_the_likeliest_candidates(served: Served) -> None:
    answer = served.post("/v1/completions", {"prompt": "pick", "max_tokens": 8, "best_of": 3, "n": 1}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] > 8, "all candidates were generated"


def test_stop_strings_cut_text_and_tokens(served: Served) -> None:
    full = served.solo_text("stop here", 40, ignore_eos=True)
    stop = full[10:13]
    body = {"prompt": "stop here", "max_tokens": 40, "stop": [stop], "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    choice = served.post("/v1/completions", body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert choice["text"] == full[: full.index(stop)]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"])
    shown = served.post("/v1/completions", body | {"include_stop_str_in_output": True}).json()["choices"][0]
    assert shown["text"] == choice["text"] + stop


def test_prompt_logprobs_follow_the_prompt(served: Served) -> None:
    answer = served.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "prompt_logprobs": 1}).json()
    prompt_ids = served.tokenizer.encode(RENDERED)
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == len(prompt_ids)
    entry = answer["prompt_logprobs"][3][str(prompt_ids[3])]
    assert entry["rank"] == 1
    assert entry["decoded_token"] == RENDERED[3]


def test_speculation_is_reported_per_request(served: Served) -> None:
    body = {"messages": MESSAGES, "max_tokens": 40, "ignore_eos": True, "per_request_spec_decode_metrics": "detailed"}
    figures = served.post("/v1/chat/completions", body).json()["metrics"]["speculative_decoding"]
    assert figures["num_spec_tokens"] == 3
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"] == len(figures["per_step_drafted"])
    assert sum(count * number for number, count in enumerate(figures["acceptance_histogram"])) == figures["num_accepted_draft_tokens"]
    assert sum(figures["per_step_accepted"]) == figures["num_accepted_draft_tokens"] > 0
    assert sum(figures["per_step_drafted"]) == figures["num_draft_tokens"]
    assert figures["mean_acceptance_length"] == pytest.approx(1 + figures["num_accepted_draft_tokens"] / figures["num_spec_steps"])
    stream = body | {"stream": True, "stream_options": {"include_usage": True}, "per_request_spec_decode_metrics": "summary"}
    events = [line.removeprefix("data: ") for line in served.post("/v1/chat/completions", stream).text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    summary = json.loads(events[-2])["metrics"]["speculative_decoding"]
    assert summary == {key: value for key, value in figures.items() if not key.startswith("per_step")}


def test_a_request_may_turn_drafting_off_or_down(served: Served) -> None:
    body = {"prompt": "the same", "max_tokens": 30, "ignore_eos": True, "per_request_spec_decode_metrics": "detailed"}
    plain = served.post("/v1/completions", body | {"speculative": {"enabled": False}}).json()
    fewer = served.post("/v1/completions", body | {"speculative": {"num_speculative_tokens": 1}}).json()
    full = served.post("/v1/completions", body).json()
    assert plain["choices"][0]["text"] == fewer["choices"][0]["text"] == full["choices"][0]["text"]
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert set(fewer["metrics"]["speculative_decoding"]["per_step_drafted"]) == {1}
    assert max(full["metrics"]["speculative_decoding"]["per_step_drafted"]) > 1


def test_continuous_usage_counts_up(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = served.client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=20, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == counts[-2]


def test_cached_tokens_are_reported(served: Served) -> None:
    prompt = "a prompt that is long enough to fill some blocks of the cache"
    first = served.client.completions.create(model="toy", prompt=prompt, max_tokens=2).usage
    second = served.client.completions.create(model="toy", prompt=prompt, max_tokens=2).usage
    assert first is not None
    assert first.prompt_tokens_details is not None
    assert second is not None
    assert second.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens > 40


def test_models_are_listed_and_retrieved(served: Served) -> None:
    listed = served.client.models.list().data
    assert [model.id for model in listed] == ["toy"]
    assert served.client.models.retrieve("toy").owned_by == "specdec"
    assert served.get("/v1/models").json()["data"][0]["max_model_len"] == 256


def test_ids_and_text_convert_both_ways(served: Served) -> None:
    tokens = served.post("/tokenize", {"prompt": "round trip", "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == 10
    assert "".join(tokens["token_strs"]) == "round trip"
    assert served.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "round trip"}
    chat = served.post("/tokenize", {"messages": MESSAGES}).json()
    assert served.post("/detokenize", {"tokens": chat["tokens"]}).json() == {"prompt": RENDERED}


def test_probes_answer(served: Served) -> None:
    health = served.get("/health")
    assert health.status_code == 200
    assert health.json()["status"] == "ok"
    assert health.json()["speculation"] == {"sources": ["ngram"], "num_speculative_tokens": 3}
    assert served.get("/ready").status_code == 200
    assert served.get("/version").json()["version"]
    assert served.get("/openapi.json").status_code == 200


def test_event_streams_are_not_cached_or_buffered(served: Served) -> None:
    with httpx.stream("POST", served.url + "/v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.read().endswith(b"data: [DONE]\n\n")
