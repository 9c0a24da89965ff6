"""Every bad body gets one line in OpenAI's error shape, and the server lives on."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import openai
import pytest

from tests.server.serving import Served

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]

BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [  # fields beside the prompt, param, part of the message
    ({"temperature": -1}, "temperature", "temperature is -1"),
    ({"temperature": "0.7"}, "temperature", "valid number"),
    ({"temperature": float("nan")}, "temperature", "temperature"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"top_p": 1.5}, "top_p", "(0, 1]"),
    ({"temperature": 1e300}, "temperature", "in [0, 100]"),  # beyond float32: once killed the engine
    ({"top_k": -2}, "top_k", "-1 or 0"),
    ({"top_k": 2**63}, "top_k", "32-bit"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty", "in [0.01, 100]"),
    ({"top_k": 1.5}, "top_k", "integer"),
    ({"min_p": 2}, "min_p", "[0, 1]"),
    ({"presence_penalty": 3}, "presence_penalty", "[-2, 2]"),
    ({"frequency_penalty": -3}, "frequency_penalty", "[-2, 2]"),
    ({"repetition_penalty": 0}, "repetition_penalty", "in [0.01, 100]"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": -5}, "max_tokens", "at least 1"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"max_tokens": 500}, "max_tokens", "maximum context length is 256"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "must not exceed max_tokens, which is 5"),
    ({"n": 0}, "n", "1..128"),
    ({"n": 129}, "n", "1..128"),
    ({"n": 3, "best_of": 2}, "best_of", "best_of is 2"),
    ({"best_of": 2, "stream": True}, "best_of", "stream"),
    ({"logprobs": 21}, "logprobs", "0..20"),
    ({"logprobs": True}, "logprobs", "integer"),
    ({"prompt_logprobs": 99}, "prompt_logprobs", "0..20"),
    ({"seed": 2**70}, "seed", "64"),
    ({"stop": [""]}, "stop", "empty string"),
    ({"bad_words": ["a", ""]}, "bad_words", "empty string"),
    ({"stop": 5}, "stop", "stop is 5"),
    ({"logit_bias": {"abc": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5": 200}}, "logit_bias", "[-100, 100]"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "0..96"),
    ({"stop_token_ids": [97]}, "stop_token_ids", "0..96"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    ({"allowed_token_ids": [1, -1]}, "allowed_token_ids", "-1"),
    ({"temprature": 1}, "temprature", "did you mean `temperature`?"),
    ({"numspeculative_tokens": 1}, "numspeculative_tokens", "unknown field"),
    ({"speculative": {"num_spec_tokens": 1}}, "speculative.num_spec_tokens", "did you mean `num_speculative_tokens`?"),
    ({"speculative": {"num_speculative_tokens": 9}}, "speculative.num_speculative_tokens", "at most 3"),
    ({"speculative": {"num_speculative_tokens": -1}}, "speculative.num_speculative_tokens", "greater than or equal to 0"),
    ({"speculative": {"method": "eagle3"}}, "speculative.method", "drafts with ngram"),
    ({"priority": 1}, "priority", "first come, first served"),
    ({"use_beam_search": True}, "use_beam_search", "best_of"),
    ({"suffix": "end"}, "suffix", "not served"),
    ({"cache_salt": "x"}, "cache_salt", "not served"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "ends where its grammar does"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}}, "response_format", 'type "foo"'),
    ({"guided_json": {"not": {"type": "string"}}}, "guided_json", "keyword not cannot be enforced"),
    ({"guided_json": "{"}, "guided_json", "no JSON text"),
    ({"guided_choice": []}, "guided_choice", "is empty"),
    ({"guided_grammar": "root ::= other"}, "guided_grammar", 'Rule "other" is not defined'),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema"),
    ({"guided_regex": "a+", "guided_choice": ["a"]}, "guided_choice", "one constraint"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "parenthesis is not closed"),
    ({"structured_outputs": {"regex": "~"}}, "structured_outputs.regex", "no token of this model can begin"),
    ({"structured_outputs": {"json": None}}, "structured_outputs", "names no constraint"),
    ({"structured_outputs": {}}, "structured_outputs", "names no constraint"),
    ({"allowed_token_ids": [96], "min_tokens": 2}, "allowed_token_ids", "forbid every token at the first token"),
    ({"allowed_token_ids": [5, 7], "stop_token_ids": [7, 5], "min_tokens": 1}, "allowed_token_ids", "allowed_token_ids and min_tokens"),
    ({"allowed_token_ids": [65], "bad_words": ["aa"]}, "allowed_token_ids", "allowed_token_ids and bad_words forbid every token after"),
    ({"guided_choice": ["yes", "no"], "allowed_token_ids": [65, 96]}, "allowed_token_ids", "guided_choice forbid every token at the first"),
    ({"guided_choice": ["no"], "allowed_token_ids": [78, 79]}, "allowed_token_ids", "after the tokens [78, 79]"),
    ({"structured_outputs": {"regex": "ab|cd"}, "allowed_token_ids": [65, 66, 67, 96]}, "allowed_token_ids", "after the tokens [67]"),
    ({"guided_choice": ["no"], "bad_words": ["o"]}, "bad_words", "bad_words and guided_choice forbid every token after the tokens [78]"),
    ({"guided_choice": ["yes", "no"], "min_tokens": 12}, "min_tokens", "the longest of the choices has at most 4 tokens"),
    ({"max_tokens": None, "min_tokens": 100_000}, "min_tokens", "only 253 tokens fit after the prompt"),
    ({"min_tokens": 17}, "min_tokens", "must not exceed max_tokens, which is 16"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
    ({"per_request_spec_decode_metrics": "all"}, "per_request_spec_decode_metrics", "'summary'"),
    ({"request_id": ""}, "request_id", "pattern"),
    ({"request_id": "\ud800"}, "request_id", "request_id is"),
    ({"\ud800": 1}, "?", "unknown field"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "not empty"),
    ({"prompt": [[]]}, "prompt", "not empty"),
    ({"prompt": [1, "a"]}, "prompt", "list of"),
    ({"prompt": 5}, "prompt", "list of"),
    ({"prompt": None}, "prompt", "list of"),
    ({"prompt": [1, 2, 97]}, "prompt", "97"),
    ({"prompt": "\ud800"}, "prompt", "lone surrogate"),
    ({"stop": "\udc00"}, "stop", "lone surrogate"),
    ({"prompt": "x" * 256}, "prompt", "maximum context length is 256"),
]

BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "messages is [], but it must hold at least 1 item"),
    ({"messages": "Hi"}, "messages", "list"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages.0.role", "'user'"),
    ({"messages": [{"role": "user"}]}, "messages", "must be text"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "string"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0.content", "image_url"),
    ({"messages": [{"role": "user", "content": "Hi", "colour": 1}]}, "messages.colour", "unknown field"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "lone surrogate"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21, but it must be in 0..20"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "top_logprobs is -1"),
    ({"max_completion_tokens": 4, "min_tokens": 5}, "min_tokens", "max_completion_tokens, which is 4"),
    ({"min_tokens": 10**6}, "min_tokens", "fit after the prompt"),
    ({"logprobs": 2}, "logprobs", "boolean"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "send one of them"),
    ({"max_completion_tokens": 1000}, "max_completion_tokens", "maximum context length"),
    ({"functions": [{"name": "f"}]}, "functions", "not served"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "its own field"),
    ({"echo": True}, "echo", "unknown field"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "maximum context length"),
    ({"messages": USER, "chat_template_kwargs": {"x": "\ud800"}, "max_tokens": 0}, "max_tokens", "at least 1"),
]

BAD_BODIES: list[tuple[bytes, str, str]] = [  # the body, code, part of the message
    (b"{", "invalid_json", "character 1"),
    (b'{"prompt": "a",}', "invalid_json", "character 15"),
    (b"\xff\xfe{}", "invalid_json", "not valid JSON"),
    (b'{"prompt": "\xff"}', "invalid_body", "not UTF-8 at byte 12"),
    (b"[1, 2]", "invalid_body", "JSON object"),
    (b'"text"', "invalid_body", "JSON object"),
    (b"", "invalid_body", "JSON object"),
    (b"[" * 100_000, "invalid_body", "nested too deeply"),
    (b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}", "invalid_body", "an integer of more than 4300 digits"),
]


def _check(response: httpx.Response, param: str, part: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert part in error["message"]
    assert "\n" not in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(("fields", "param", "part"), BAD_COMPLETIONS, ids=[json.dumps(row[0])[:50] for row in BAD_COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_bad_completion_is_refused(served: Served, fields: dict[str, Any], param: str, part: str, stream: bool) -> None:
    body = {"prompt": "abc"} | ({"stream": True} if stream else {}) | fields
    if fields.get("stream_options") == {"include_usage": True} and stream:
        body["stream"] = False
    text = json.dumps(body)
    _check(served.http.post(served.url + COMPLETION, content=text, headers={"content-type": "application/json"}), param, part)


@pytest.mark.parametrize(("fields", "param", "part"), BAD_CHATS, ids=[json.dumps(row[0])[:50] for row in BAD_CHATS])
def test_a_bad_chat_is_refused(served: Served, fields: dict[str, Any], param: str, part: str) -> None:
    text = json.dumps({"messages": USER} | fields)
    _check(served.http.post(served.url + CHAT, content=text, headers={"content-type": "application/json"}), param, part)


@pytest.mark.slow
def test_a_thousand_refusals_leave_nothing_behind(served: Served) -> None:
    """Refused at admission means: no request, no block, no task, and the next answer is right."""
    served.wait_idle()
    pool, before = served.engine.core._scheduler.kv.pool, served.http.get(served.url + "/health").json()
    texts = [json.dumps({"prompt": "abc"} | fields) for fields, _, _ in BAD_COMPLETIONS if "stream_options" not in fields]
    for index in range(1000):
        text = texts[index % len(texts)]
        answer = served.http.post(served.url + COMPLETION, content=text, headers={"content-type": "application/json"})
        assert answer.status_code == 400, text
    assert served.engine.num_unfinished == 0
    assert pool.num_free == pool.num_usable
    assert served.http.get(served.url + "/health").json() == before
    after = served.post(COMPLETION, {"prompt": "abc", "max_tokens": 20, "temperature": 0}).json()["choices"][0]["text"]
    assert after == served.solo_text("abc", 20)


def test_all_offenders_are_named_at_once(served: Served) -> None:
    body = {
        "prompt": "abc",
        "priority": 2,
        "stop_token_ids": [500],
        "guided_regex": "a",
        "ignore_eos": True,
        "speculative": {"method": "magic"},
    }
    message = served.post(COMPLETION, body).json()["error"]["message"]
    for part in ("priority", "stop_token_ids", "ignore_eos", "speculative.method"):
        assert part in message
    unknown = served.post(COMPLETION, {"prompt": "abc", "alpha": 1, "beta": 2}).json()["error"]["message"]
    assert "`alpha`" in unknown
    assert "`beta`" in unknown


@pytest.mark.parametrize(
    ("raw", "code", "part"),
    BAD_BODIES,
    ids=["open", "comma", "utf16", "latin1", "list", "string", "empty", "deep", "huge-number"],
)
def test_a_body_that_is_no_object_is_refused(served: Served, raw: bytes, code: str, part: str) -> None:
    response = served.http.post(served.url + COMPLETION, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["code"] == code
    assert part in response.json()["error"]["message"]


def test_a_body_of_another_type_is_refused_with_the_type_to_send(served: Served) -> None:
    response = served.http.post(served.url + COMPLETION, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


def test_an_overflow_has_the_code_that_clients_look_for(served: Served) -> None:
    error = served.post(COMPLETION, {"prompt": "abc", "max_tokens": 254}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "256" in error["message"]
    assert "257" in error["message"]
    assert served.post(COMPLETION, {"prompt": "abc", "max_tokens": 253, "stop_token_ids": list(range(96))}).status_code == 200


def test_null_lengths_fill_the_context_and_absent_ones_are_sixteen(served: Served) -> None:
    filled = served.post(COMPLETION, {"prompt": "abc", "max_tokens": None, "ignore_eos": True}).json()
    assert filled["usage"]["total_tokens"] == 256
    assert served.post(COMPLETION, {"prompt": "abc", "ignore_eos": True}).json()["usage"]["completion_tokens"] == 16


def test_another_model_is_404(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        served.client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "Hi"}])
    assert caught.value.code == "model_not_found"
    assert "'toy'" in str(caught.value)
    assert served.get("/v1/models/other/name").status_code == 404


def test_wrong_routes_and_methods_have_the_same_shape(served: Served) -> None:
    missing, method = served.get("/v1/nowhere"), served.get(COMPLETION)
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "not_found"
    assert method.status_code == 405
    assert method.headers["allow"] == "POST"
    assert method.json()["error"]["code"] == "method_not_allowed"


def test_no_ops_and_neutral_values_pass(served: Served) -> None:
    neutral: dict[str, Any] = {
        "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True, "tools": [],
        "tool_choice": "none", "modalities": ["text"], "logit_bias": {}, "min_p": 0, "top_k": -1, "stop": None, "seed": None,
        "response_format": {"type": "text"}, "reasoning_effort": None, "length_penalty": 1.0, "n": 1, "speculative": None, "priority": 0,
    }  # fmt: skip
    assert served.post(CHAT, {"messages": USER, "max_tokens": 2} | neutral).status_code == 200


def test_content_parts_and_other_roles_pass(served: Served) -> None:
    messages = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}], "name": "Bo"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "user", "content": ""},
    ]
    tokens = served.post("/tokenize", {"messages": messages}).json()["tokens"]
    text = served.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text.startswith("system: Be brief user: Hi")
    assert served.post(CHAT, {"messages": messages, "max_tokens": 2}).status_code == 200


def test_constraints_that_leave_a_way_pass(served: Served) -> None:
    """The rules of the refusals above, each with one more token allowed. (The toy worker applies no grammar, so only the status tells.)"""
    for fields in (
        {"allowed_token_ids": [65, 96], "min_tokens": 2},
        {"guided_choice": ["no"], "allowed_token_ids": [78, 79, 96]},
        {"structured_outputs": {"regex": "ab|cd"}, "allowed_token_ids": [65, 66, 96]},
        {"structured_outputs": {"regex": "[a-z]{3}"}, "bad_words": ["o", "ab"]},
        {"guided_choice": ["yes", "no"], "min_tokens": 4},
    ):
        response = served.post(COMPLETION, {"prompt": "abc", "max_tokens": 4, **fields})
        assert response.status_code == 200, response.text


def test_what_a_template_trips_over_is_not_shown(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates add texts together; a message without content, and tool messages, are texts to them."""
    monkeypatch.setattr(served.tokenizer.hf, "chat_template", "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    quiet = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "5"}]
    assert served.post(CHAT, {"messages": quiet, "max_tokens": 1}).status_code == 200
    for template, shown in (
        ("{{ messages[0]['content'] + 5 }}", False),
        ("{{ nothing.here }}", False),
        ("{{ raise_exception('roles must alternate') }}", True),
    ):
        monkeypatch.setattr(served.tokenizer.hf, "chat_template", template)
        message = served.post(CHAT, {"messages": USER}).json()["error"]["message"]
        assert message.startswith("messages do not fit the model's chat template" + (": roles must alternate" if shown else " (hint"))


def test_garbage_on_the_socket_does_not_stop_the_server(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    for raw in (b"\x00\xff\x13garbage\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{"):
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(raw)
    assert served.get("/health").status_code == 200


def test_token_routes_refuse_bad_bodies(served: Served) -> None:
    assert served.post("/tokenize", {}).status_code == 400
    assert served.post("/tokenize", {"prompt": "a", "messages": USER}).status_code == 400
    assert served.post("/detokenize", {"tokens": [97]}).json()["error"]["param"] == "tokens"
    assert served.post("/detokenize", {"tokens": ["1"]}).status_code == 400
