"""Tools through OpenAI's own client: calls in each format, whole and streamed, forced by a grammar, and refused by name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from specdec.config.speculative import NgramConfig
from specdec.server.options import ServerOptions
from tests.server.serving import TEMPLATE, Served
from tests.server.speaking import TOOL_TEMPLATE, babbling, speaking, tokenizer_with

USER: Any = [{"role": "user", "content": "Hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"], "additionalProperties": False}
TREE = {  # with references, which must survive being moved
    "type": "object",
    "properties": {"left": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]}, "n": {"$ref": "#/$defs/leaf"}},
    "required": ["left", "n"],
    "additionalProperties": False,
    "$defs": {"leaf": {"type": "integer", "minimum": 1, "maximum": 9}},
}
SCHEMAS: dict[str, Any] = {"weather": CITY, "tree": TREE, "now": None}


def tool(name: str, **more: Any) -> Any:
    function = {"name": name, "description": f"about {name}", **more}
    return {"type": "function", "function": function | ({"parameters": SCHEMAS[name]} if SCHEMAS[name] else {})}


TOOLS = [tool(name) for name in SCHEMAS]
TWO = (
    'I look. 日本\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🎉"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
EXPECTED = [("weather", {"city": "Zürich 🎉"}), ("now", {})]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    assert len({call.id for call in message.tool_calls or ()}) == len(message.tool_calls or ())
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", TWO),
        ("llama3_json", '{"name": "weather", "parameters": {"city": "Zürich 🎉"}}; {"name": "now", "parameters": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Zürich 🎉"}}, {"name": "now", "arguments": {}}]'),
    ],
)
def test_calls_are_the_same_whole_and_streamed(parser: str, text: str) -> None:
    with speaking(text, options=ServerOptions(tool_call_parser=parser)) as served:
        whole = served.client.chat.completions.create(model="toy", messages=USER, tools=TOOLS, n=2)
        for choice in whole.choices:
            assert choice.finish_reason == "tool_calls"
            assert calls_of(choice.message) == EXPECTED
            assert choice.message.content == ("I look. 日本" if parser == "hermes" else None)
        with served.client.chat.completions.stream(model="toy", messages=USER, tools=TOOLS, logprobs=True) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert calls_of(final.message) == EXPECTED
        assert (final.message.content or None) == whole.choices[0].message.content
        assert len(final.logprobs.content) == whole.usage.completion_tokens / 2, "held text loses no log-probability"  # type: ignore[union-attr]


def test_a_marker_that_is_a_special_token_is_seen_all_the_same() -> None:
    """Decoding leaves special tokens out; <tool> is one of this tokenizer, as [TOOL_CALLS] is of Mistral's."""
    from specdec.server.answers.calls import Hermes

    class Special(Hermes):
        marker, END = "<tool>", "</tool>"

    text = '<tool>{"name": "now", "arguments": {}}</tool>'
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("specdec.server.answers.formats", fromlist=["CALL_READERS"]).CALL_READERS, "hermes", Special)
        with speaking(text, options=ServerOptions(tool_call_parser="hermes")) as served:
            called = served.client.chat.completions.create(model="toy", messages=USER, tools=TOOLS).choices[0]
            assert calls_of(called.message) == [("now", {})]
            assert called.message.content is None
            plain = served.client.chat.completions.create(model="toy", messages=USER).choices[0].message
            assert plain.content == text.removeprefix("<tool>"), "without tools, special tokens stay out"


def test_an_answer_without_calls_and_an_answer_without_tools_are_text() -> None:
    with speaking(TWO) as served:
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
            choice = served.client.chat.completions.create(model="toy", messages=USER, **more).choices[0]  # type: ignore[call-overload]
            assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (TWO, None, "stop")
        one = served.client.chat.completions.create(model="toy", messages=USER, tools=TOOLS, parallel_tool_calls=False).choices[0]
        assert calls_of(one.message) == EXPECTED[:1]
        cut = served.client.chat.completions.create(model="toy", messages=USER, tools=TOOLS, max_tokens=40).choices[0]
        assert cut.finish_reason == "length"
        assert cut.message.tool_calls is None
        assert cut.message.content
        assert TWO.startswith(cut.message.content), "a call that was cut is shown as text"


def prompt_of(served: Served, **body: Any) -> str:
    tokens = served.post("/tokenize", body | {"add_special_tokens": False}).json()["tokens"]
    return served.tokenizer.decode(tokens, skip_special_tokens=False)


CONVERSATION: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "How is"}, {"type": "text", "text": "Rome?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "abc", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}],
    },
    {"role": "tool", "tool_call_id": "abc", "content": "sunny"},
]


def test_templates_read_tools_calls_and_results() -> None:
    """The oracle is the template itself, rendered by the library with arguments as objects."""
    with speaking("ok") as served:
        told = [message | {"content": message["content"] or ""} for message in CONVERSATION]
        told[1]["content"] = "How is\nRome?"
        told[2]["tool_calls"] = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}, "id": "abc"}]
        expected = tokenizer_with(TOOL_TEMPLATE).hf.apply_chat_template(told, tools=TOOLS[:1], add_generation_prompt=True, tokenize=False)
        assert prompt_of(served, messages=CONVERSATION, tools=TOOLS[:1]) == expected
        assert '<tool_call>weather {"city": "Rome"}</tool_call>' in expected
        answer = served.client.chat.completions.create(model="toy", messages=CONVERSATION, tools=TOOLS[:1])
        assert answer.usage
        assert answer.usage.prompt_tokens == len(served.tokenizer.encode(expected, add_special_tokens=False))


def test_a_template_that_knows_no_tools_is_told_in_messages() -> None:
    with speaking(TWO, template=TEMPLATE) as served:
        prompt = prompt_of(served, messages=CONVERSATION, tools=TOOLS[:1])
        assert prompt.startswith("system: Be brief.\n\nYou can call these functions")
        assert json.dumps(TOOLS[0]["function"]) in prompt
        assert '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>' in prompt
        assert "user: <tool_response>sunny</tool_response>" in prompt
        assert "You can call" not in prompt_of(served, messages=CONVERSATION, tools=TOOLS, tool_choice="none")
        assert prompt_of(served, messages=USER, tools=TOOLS[:1]).startswith("system: You can call")
        choice = served.client.chat.completions.create(model="toy", messages=CONVERSATION, tools=TOOLS).choices[0]
        assert calls_of(choice.message) == EXPECTED


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random model with a grammar and drafts."""
    speculative = NgramConfig(num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=2)
    with babbling(tmp_path_factory.mktemp("tools"), speculative=speculative) as client:
        yield client


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tree"}}], ids=["required", "named"])
def test_a_forced_call_is_valid_whatever_the_model(model: openai.OpenAI, choice: Any) -> None:
    """The model is random, so that nothing but the grammar can make its calls valid; jsonschema is the judge."""
    seen = set()
    for seed in range(8):
        common: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
        whole = model.chat.completions.create(**common).choices[0]
        assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
        assert whole.message.content is None
        ((name, arguments),) = calls_of(whole.message)
        jsonschema.validate(arguments, SCHEMAS[name] or {"type": "object", "maxProperties": 0})
        seen.add(name)
        deltas = [chunk.choices[0] for chunk in model.chat.completions.create(**common, stream=True)]
        pieces = [call.function for delta in deltas for call in delta.delta.tool_calls or ()]
        assert [piece.name for piece in pieces if piece.name] == [name]
        assert json.loads("".join(piece.arguments or "" for piece in pieces)) == arguments
        assert deltas[-1].finish_reason == whole.finish_reason
    assert seen <= SCHEMAS.keys() if choice == "required" else seen == {"tree"}


def test_required_may_call_several_times(model: openai.OpenAI) -> None:
    counts = set()
    for seed in range(6):
        choice = model.chat.completions.create(
            model="tiny", messages=USER, tools=[tool("now")], tool_choice="required", seed=seed, max_tokens=400, temperature=1.5
        ).choices[0]
        calls = calls_of(choice.message)
        counts.add(len(calls))
        assert {name for name, _ in calls} == {"now"}
    assert min(counts) >= 1
    assert max(counts) > 1


def test_structured_outputs_parse_into_models(model: openai.OpenAI) -> None:
    class Point(BaseModel):
        """A place."""

        x: bool
        label: str | None

    done = model.chat.completions.parse(model="tiny", messages=USER, response_format=Point, seed=3, max_tokens=600)
    assert isinstance(done.choices[0].message.parsed, Point)
    called = model.chat.completions.parse(
        model="tiny",
        messages=USER,
        tools=[openai.pydantic_function_tool(Point)],
        tool_choice={"type": "function", "function": {"name": "Point"}},
        seed=5,
        max_tokens=600,
    )
    (call,) = called.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Point)


def test_the_asynchronous_client_gets_the_same() -> None:
    async def ask(url: str) -> tuple[Any, Any]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(model="toy", messages=USER, tools=TOOLS)
            async with client.chat.completions.stream(model="toy", messages=USER, tools=TOOLS) as stream:
                return whole.choices[0].message, (await stream.get_final_completion()).choices[0].message

    with speaking(TWO) as served:
        whole, streamed = asyncio.run(ask(served.url))
        assert calls_of(whole) == calls_of(streamed) == EXPECTED


NAMED = {"type": "function", "function": {"name": "weather"}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "required"}, "tool_choice", "tools is empty"),
    ({"tool_choice": NAMED}, "tool_choice", "tools is empty"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "names 'x', but tools has weather, tree",
    ),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "must be 'none', 'auto', 'required'"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "must be 'none', 'auto', 'required'"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "'weather' twice"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools", "tools.type is 'custom', but only 'function' is served"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
    ({"tools": [{"type": "function", "function": {"name": "a", "params": {}}}]}, "tools.function.params", "unknown field"),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tool_choice", "response_format holds the whole answer"),
    ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex", "tools and guided_regex are given"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}], "tool_choice": "required"},
        "tools",
        "#/$defs/tool0: the keyword not cannot be enforced",
    ),
    ({"functions": [{"name": "f"}]}, "functions", "send those"),
    ({"include_reasoning": False}, "include_reasoning", "--reasoning-parser"),
    (
        {"messages": [*USER, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1]"}}]}]},
        "messages",
        "arguments of the call of 'f' are '[1]', but they must be the JSON text of an object",
    ),
]


@pytest.fixture(scope="module")
def roomy() -> Any:
    """A server with room for the descriptions of all tools."""
    with speaking("ok") as running:
        yield running


@pytest.mark.parametrize(("fields", "param", "part"), REFUSED, ids=[json.dumps(row[0])[:60] for row in REFUSED])
def test_what_cannot_be_served_is_refused_by_name(roomy: Served, fields: dict[str, Any], param: str, part: str) -> None:
    response = roomy.post("/v1/chat/completions", {"messages": USER} | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert part in error["message"]
    assert error["param"] == param


def test_a_server_may_leave_no_choice_to_the_model() -> None:
    body = {"messages": USER, "tools": TOOLS}
    with speaking("x", options=ServerOptions(enable_auto_tool_choice=False)) as served:
        assert "--no-enable-auto-tool-choice" in served.post("/v1/chat/completions", body).json()["error"]["message"]
    with speaking("x", template="{{ tools }} in a format of its own") as served:
        assert "format of this model's calls is not known" in served.post("/v1/chat/completions", body).json()["error"]["message"]
        assert served.post("/v1/chat/completions", body | {"tool_choice": "none"}).status_code == 200


THINKING = "<think>\nLet me see: 2 < 3,\n日本.\n</think>\n\nYes, 日本."


@pytest.mark.parametrize("shows", [True, False])
def test_reasoning_is_apart_whole_and_streamed(shows: bool) -> None:
    common: Any = {"model": "toy", "messages": USER, "extra_body": {} if shows else {"include_reasoning": False}}
    with speaking(THINKING, options=ServerOptions(reasoning_parser="qwen3")) as served:
        whole = served.client.chat.completions.create(**common)
        message = whole.choices[0].message
        assert message.content == "Yes, 日本."
        thoughts = "Let me see: 2 < 3,\n日本."
        assert getattr(message, "reasoning_content", None) == (thoughts if shows else None)
        usage: Any = whole.usage
        assert usage.completion_tokens_details.reasoning_tokens == len(served.tokenizer.encode(thoughts, add_special_tokens=False))
        chunks = list(served.client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}))
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == message.content
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == (thoughts if shows else "")
        assert chunks[-1].usage.completion_tokens_details == usage.completion_tokens_details
        assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}
        assert whole.system_fingerprint.startswith("fp_")


def test_a_constraint_leaves_no_room_for_reasoning() -> None:
    with speaking('"a"', options=ServerOptions(reasoning_parser="deepseek_r1")) as served:
        body: Any = {"model": "toy", "messages": USER}
        assert served.client.chat.completions.create(**body).choices[0].message.content is None
        held = served.client.chat.completions.create(**body, extra_body={"guided_regex": '"a"'}).choices[0].message
        assert held.content == '"a"'
