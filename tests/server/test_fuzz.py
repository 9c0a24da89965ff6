"""Bodies made from our own OpenAPI document, and from values at the edges: no answer is a server error, and the server lives on.

FUZZ_CASES sets the cases per route: FUZZ_CASES=2000 is the full form, 100 is what runs otherwise.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from specdec.config.speculative import NgramConfig
from specdec.server.options import ServerOptions
from tests.server.speaking import tiny_app

pytestmark = pytest.mark.slow

NUM_CASES = int(os.environ.get("FUZZ_CASES", "100"))
OURS = r"^/(v1/.*|tokenize|detokenize|health|ready|version|metrics)$"
SETTINGS = settings(max_examples=NUM_CASES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a random model that drafts and can spell JSON; short contexts keep each case short."""
    speculative = NgramConfig(num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=2)
    options = ServerOptions(reasoning_parser="qwen3", request_timeout_s=60)
    with tiny_app(tmp_path_factory.mktemp("fuzz"), speculative=speculative, options=options, max_model_len=160) as (found, _):
        yield found


@pytest.fixture(scope="module")
def document(url: str) -> Any:
    """What the server says of itself."""
    return schemathesis.openapi.from_url(url + "/openapi.json").include(path_regex=OURS)


def check(response: Any) -> None:
    """No server error; errors have OpenAI's shape."""
    assert response.status_code < 500, (response.status_code, response.text[:500])
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}, response.text[:500]


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_no_case_of_the_document_is_a_server_error(document: Any, mode: schemathesis.GenerationMode) -> None:
    """Bodies that the document allows, and bodies that it does not."""
    routes = [result.ok() for result in document.get_all_operations()]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"} <= {route.path for route in routes}
    for route in routes:

        @given(case=route.as_strategy(generation_mode=mode))
        @SETTINGS
        def ask(case: Any) -> None:
            check(case.call(timeout=120))

        try:
            ask()
        except Unsatisfiable:
            assert route.method.upper() != "POST", "a route without a body has no wrong ones"


TEXT = st.sampled_from(
    ["", "a", "Hi", "日本 🎉", "\ud800", "\x00", "{", "[[", "\\", "x" * 50, "x" * 500, "<think>", "<tool_call>{", "\u202e"]
)
NUMBER = st.sampled_from(
    [0, 1, 2, -1, 0.5, 1.0, 1e-9, 2.5, 100, 1e30, -0.0, 2**31, 2**63, 2**70, True, "1", None, float("nan"), float("inf")]
)
COUNT = st.sampled_from([0, 1, 2, 3, 5, 20, 21, 128, 129, 1000, -1, 2**63, None])
IDS = st.lists(st.sampled_from([0, 1, 5, 96, 200, 255, 256, 257, 270, 285, 300, -1, 2**40]), max_size=4)
SCHEMA = st.sampled_from(
    [
        {},
        True,
        {"type": "object"},
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
        {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        {"$ref": "#"},
        {"$ref": "#/$defs/x"},
        {"enum": []},
        {"const": "a"},
        {"type": "string", "pattern": "("},
        {"type": "integer", "minimum": 3, "maximum": 1},
        {"not": {}},
        {"properties": []},
        {"type": 5},
        {"required": 5},
        {"anyOf": [{"type": "null"}, {"type": "number"}]},
    ]
)
STREAM = st.sampled_from([{"include_usage": True}, {"continuous_usage_stats": True}, {}, None])
FUNCTION = st.fixed_dictionaries({"name": st.sampled_from(["f", "g", "a b", ""])}, optional={"parameters": SCHEMA, "strict": st.booleans()})
TOOLS = st.lists(FUNCTION.map(lambda function: {"type": "function", "function": function}), max_size=2)
FLAT_TOOLS = st.lists(FUNCTION.map(lambda function: {"type": "function", **function}), max_size=2)
CALLED = st.fixed_dictionaries({"name": TEXT, "arguments": st.sampled_from(["{}", '{"a": 1}', "[", "", "5"])})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"])},
    optional={
        "content": TEXT | st.lists(TEXT.map(lambda text: {"type": "text", "text": text}), max_size=2) | st.none(),
        "tool_calls": st.lists(CALLED.map(lambda function: {"id": "c", "type": "function", "function": function}), max_size=2),
        "tool_call_id": TEXT,
        "reasoning_content": TEXT,
    },
)
ITEM = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "developer"]), "content": TEXT}),
    CALLED.map(lambda function: {"type": "function_call", "call_id": "c", **function}),
    st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": TEXT, "output": TEXT}),
    st.fixed_dictionaries(
        {"type": st.just("reasoning"), "content": st.lists(TEXT.map(lambda text: {"type": "reasoning_text", "text": text}))}
    ),
    st.fixed_dictionaries({"type": TEXT}),
)
SHARED: dict[str, st.SearchStrategy[Any]] = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": COUNT,
    "min_p": NUMBER,
    "seed": COUNT,
    "frequency_penalty": NUMBER,
    "presence_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "stream": st.booleans(),
    "stream_options": STREAM,
    "speculative": st.sampled_from(
        [{}, {"enabled": False}, {"num_speculative_tokens": 1}, {"num_speculative_tokens": 9}, {"method": "ngram"}]
    ),
    "priority": COUNT,
    "request_id": TEXT,
}
GENERATION = SHARED | {
    "n": st.sampled_from([1, 2, 3, 0, -1, None]),
    "min_tokens": COUNT,
    "logit_bias": st.dictionaries(st.sampled_from(["0", "5", "256", "999", "x", "-1"]), NUMBER, max_size=2),
    "allowed_token_ids": IDS,
    "stop_token_ids": IDS,
    "bad_words": st.lists(TEXT, max_size=2),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "prompt_logprobs": COUNT,
    "return_token_ids": st.booleans(),
    "guided_json": SCHEMA,
    "guided_regex": st.sampled_from(["a", "[ab]{3}", "a*", "(", "\\", "", "[^a]", "a{1000}", "(a|b)*c", "^$"]),
    "guided_choice": st.lists(TEXT, max_size=3),
    "guided_grammar": st.sampled_from(['root ::= "a"', "root ::= root", "", "x", 'root ::= "a" root | "b"']),
    "structured_outputs": st.sampled_from([{}, {"json_object": True}, {"json_object": False}, {"choice": []}, {"regex": "ab|cd"}]),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {"type": "x"}]),
    "per_request_spec_decode_metrics": st.sampled_from(["none", "summary", "detailed", "x"]),
}
ROUTES: dict[str, tuple[dict[str, st.SearchStrategy[Any]], dict[str, st.SearchStrategy[Any]]]] = {
    "/v1/completions": (
        {"prompt": TEXT | st.lists(TEXT, max_size=2) | IDS},
        GENERATION | {"max_tokens": COUNT, "logprobs": COUNT, "echo": st.booleans(), "best_of": st.sampled_from([1, 2, 3, 0])},
    ),
    "/v1/chat/completions": (
        {"messages": st.lists(MESSAGE, max_size=3)},
        GENERATION
        | {
            "max_tokens": COUNT,
            "max_completion_tokens": COUNT,
            "logprobs": st.booleans(),
            "top_logprobs": COUNT,
            "tools": TOOLS,
            "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}, "x"]),
            "parallel_tool_calls": st.booleans(),
            "include_reasoning": st.booleans(),
            "chat_template_kwargs": st.sampled_from([{}, {"x": 1}, {"tools": []}]),
        },
    ),
    "/v1/responses": (
        {"input": TEXT | st.lists(ITEM, max_size=4)},
        SHARED
        | {
            "instructions": TEXT,
            "max_output_tokens": COUNT,
            "store": st.booleans(),
            "tools": FLAT_TOOLS,
            "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "name": "f"}, "x"]),
            "text": st.sampled_from(
                [{}, {"format": {"type": "text"}}, {"format": {"type": "json_object"}}, {"format": {"type": "json_schema"}}]
            ),
        },
    ),
    "/tokenize": ({}, {"prompt": TEXT, "messages": st.lists(MESSAGE, max_size=2), "tools": TOOLS, "return_token_strs": st.booleans()}),
    "/detokenize": ({"tokens": IDS}, {"skip_special_tokens": st.booleans()}),
}


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """The needed fields and a few others: few enough that many bodies are served, odd enough that many are not."""
    needed, others = ROUTES[path]
    names = draw(st.lists(st.sampled_from(sorted(others)), max_size=3, unique=True))
    return {name: draw(strategy) for name, strategy in {**needed, **{name: others[name] for name in names}}.items()}


@pytest.mark.parametrize("path", ROUTES)
def test_no_body_of_odd_values_is_a_server_error(url: str, path: str) -> None:
    statuses: list[int] = []
    with httpx.Client(timeout=120) as http:

        @given(body=bodies(path))
        @SETTINGS
        def ask(body: dict[str, Any]) -> None:
            response = http.post(url + path, content=json.dumps(body), headers={"content-type": "application/json"})
            check(response)
            assert not any(sign in response.text for sign in ('data: {"error"', '"response.failed"')), "an error inside a stream"
            statuses.append(response.status_code)

        ask()
        assert http.get(url + "/health").status_code == 200
    assert min(statuses.count(200), statuses.count(400)) >= NUM_CASES // 25, "the values must reach both sides of the rules"
