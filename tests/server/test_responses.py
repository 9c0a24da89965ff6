"""/v1/responses through OpenAI's own client: items, events, tools, structured outputs; and what is refused, by name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel, TypeAdapter

from specdec.server.options import ServerOptions
from tests.server.serving import Served, serving
from tests.server.speaking import babbling, speaking
from tests.server.test_tools import CITY, TREE, TWO, prompt_of

FULL = "<think>2 < 3, 日本.</think>\n" + TWO + " Done."
WEATHER: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": True, "description": "of a city"}
NOW: Any = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}, "strict": False}


@pytest.fixture(scope="module")
def talker() -> Any:
    """A server whose answers have reasoning, text and two calls."""
    with speaking(FULL, options=ServerOptions(reasoning_parser="qwen3")) as running:
        yield running


def shape(response: Any) -> list[Any]:
    """The items without their ids."""
    found: list[Any] = []
    for item in response.output:
        assert item.status == "completed"
        if item.type == "function_call":
            found.append((item.name, json.loads(item.arguments)))
        else:
            found.append((item.type, item.content[0].text))
    return found


def test_a_text_is_answered_and_counted(served: Served) -> None:
    """The oracle is the toy target itself, asked without server, batch or drafts."""
    response = served.client.responses.create(model="toy", input="Hi", max_output_tokens=12, instructions="Be brief.")
    prompt = "system: Be brief. user: Hi assistant: "
    assert response.output_text == served.solo_text(prompt, 12)
    assert response.usage
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(prompt), 12)
    assert response.usage.total_tokens == len(prompt) + 12
    assert response.status == "incomplete"
    assert response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.model_extra["store"] is False  # type: ignore[index]
    TypeAdapter(Response).validate_python(response.model_dump(exclude_unset=True))


def test_items_are_the_parts_of_the_answer_in_order(talker: Served) -> None:
    response = talker.client.responses.create(model="toy", input="Hi", tools=[WEATHER, NOW], metadata={"k": "v"})
    assert response.status == "completed"
    assert shape(response) == [
        ("reasoning", "2 < 3, 日本."),
        ("message", "I look. 日本"),
        ("weather", {"city": "Zürich 🎉"}),
        ("now", {}),
        ("message", " Done."),
    ]
    assert response.usage
    assert response.usage.output_tokens_details.reasoning_tokens == len(talker.tokenizer.encode("2 < 3, 日本.", add_special_tokens=False))
    assert response.metadata == {"k": "v"}
    assert response.tools[0].model_dump(exclude_unset=True) == WEATHER
    ids = [item.id for item in response.output]
    assert len(set(ids)) == len(ids)
    Response.model_validate(response.model_dump(exclude_unset=True))


def test_the_stream_has_every_event_in_order_and_adds_up(talker: Served) -> None:
    common: Any = {"model": "toy", "input": "Hi", "tools": [WEATHER, NOW]}
    whole = talker.client.responses.create(**common)
    events: list[Any] = list(talker.client.responses.create(**common, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert events[-1].type == "response.completed"
    assert shape(events[-1].response) == shape(whole)
    for index, item in enumerate(events[-1].response.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        kind = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}[item.type]
        names = [event.type.removeprefix("response.") for event in own]
        deltas = [event.delta for event in own if event.type == f"response.{kind}.delta"]
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(deltas) == text
        parts = item.type != "function_call"
        around = ["output_item.added", *(["content_part.added"] if parts else [])]
        after = [f"{kind}.done", *(["content_part.done"] if parts else []), "output_item.done"]
        assert names == [*around, *[f"{kind}.delta"] * len(deltas), *after]
        assert own[-1].item == item
        assert {event.item_id for event in own if hasattr(event, "item_id")} == {item.id}
    assert len([event for event in events if event.type == "response.output_text.delta"]) > 3, "text comes piece by piece"


def test_the_wire_names_each_event_and_ends_without_done(talker: Served) -> None:
    raw = talker.post("/v1/responses", {"input": "Hi", "stream": True}).text
    assert "[DONE]" not in raw
    for block in raw.strip().split("\n\n"):
        name, data = block.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")


def test_the_clients_accumulate_the_stream(talker: Served) -> None:
    with talker.client.responses.stream(model="toy", input="Hi", tools=[WEATHER, NOW]) as stream:
        final = stream.get_final_response()

    async def ask() -> Any:
        async with (
            openai.AsyncOpenAI(base_url=talker.url + "/v1", api_key="none", max_retries=0) as client,
            client.responses.stream(model="toy", input="Hi", tools=[WEATHER, NOW]) as stream,
        ):
            return await stream.get_final_response()

    assert shape(final) == shape(asyncio.run(ask())) == shape(talker.client.responses.create(model="toy", input="Hi", tools=[WEATHER, NOW]))


def test_input_items_become_the_conversation_that_chat_would_have(talker: Served) -> None:
    """What a client sends back, items of an earlier response included, is the prompt of the same chat messages."""
    earlier = talker.client.responses.create(model="toy", input="Hi", tools=[WEATHER])
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "How is"}, {"type": "input_text", "text": "Rome?"}]},
        *[item.model_dump(exclude_unset=True) for item in earlier.output[:4]],
        {"type": "function_call_output", "call_id": "a", "output": "sunny"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    response = talker.client.responses.create(model="toy", input=items, tools=[WEATHER], instructions="First.")
    call = {"function": {"name": "weather", "arguments": '{"city": "Zürich 🎉"}'}, "id": earlier.output[2].call_id}  # type: ignore[union-attr]
    now = {"function": {"name": "now", "arguments": "{}"}, "id": earlier.output[3].call_id}  # type: ignore[union-attr]
    messages = [
        {"role": "system", "content": "First."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is\nRome?"},
        {"role": "assistant", "content": "I look. 日本", "reasoning_content": "2 < 3, 日本.", "tool_calls": [call, now]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}]
    prompt = prompt_of(talker, messages=messages, tools=tools)
    assert "sunny" in prompt
    assert response.usage
    assert response.usage.input_tokens == len(talker.tokenizer.encode(prompt, add_special_tokens=False))


def test_structured_outputs_and_forced_calls_hold_for_any_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    class Point(BaseModel):
        """A place."""

        x: bool
        label: str | None

    with babbling(tmp_path_factory.mktemp("responses")) as client:
        parsed = client.responses.parse(model="tiny", input="Hi", text_format=Point, max_output_tokens=600, extra_body={"seed": 3})
        assert isinstance(parsed.output_parsed, Point)
        tree: Any = {"type": "function", "name": "tree", "parameters": TREE, "strict": True}
        for choice in ("required", {"type": "function", "name": "tree"}):
            common: Any = {"model": "tiny", "input": "Hi", "tools": [tree], "tool_choice": choice, "parallel_tool_calls": False}
            response = client.responses.create(**common, extra_body={"seed": 1})
            (call,) = response.output
            assert call.type == "function_call"
            jsonschema.validate(json.loads(call.arguments), TREE)
            assert response.status == "completed"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"store": True}, "store", "responses are not stored here"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier items in input"),
    ({"conversation": "c"}, "conversation", "not stored"),
    ({"background": True}, "background", "not stored"),
    ({"include": ["reasoning.encrypted_content"]}, "include", "output holds all there is"),
    ({"reasoning": {"effort": "low"}}, "reasoning", "chat_template_kwargs"),
    ({"truncation": "auto"}, "truncation", "served whole or refused"),
    ({"messages": []}, "messages", "it is called input here"),
    ({"max_tokens": 5}, "max_tokens", "it is called max_output_tokens here"),
    ({"colour": 1}, "colour", "unknown field"),
    ({"max_output_tokens": 100_000}, "max_output_tokens", "max_output_tokens is 100000"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0, but it must be at least 1"),
    ({"temperature": -1}, "temperature", "temperature is -1"),
    ({"input": []}, "input", "not empty"),
    ({"input": 5}, "input", "input is 5"),
    ({"input": "x" * 5000}, "input", "maximum context length"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "a part of input[0].content has type"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input", "input[0].role is 'wizard'"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input[0].type is 'item_reference'"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input", "input[0].call_id is None"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]}, "input", "JSON text of an object"),
    ({"input": [{"role": "user", "content": "\ud800"}]}, "input", "input has the lone surrogate"),
    ({"input": [{"type": "reasoning", "encrypted_content": "abc", "summary": []}]}, "input", "cannot be read here"),
    ({"input": [{"type": "reasoning", "content": [], "summary": []}]}, "input", "input holds no message"),
    ({"tools": [{"type": "web_search", "filters": {}}]}, "tools", "tools.type is 'web_search', but only 'function' is served"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "'weather' twice"),
    ({"tool_choice": {"type": "function", "name": "x"}, "tools": [WEATHER]}, "tool_choice", "names 'x'"),
    ({"tool_choice": "always"}, "tool_choice", "must be 'none'"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", "schema goes with"),
    ({"text": {"format": {"type": "json_object"}}, "tools": [WEATHER]}, "tool_choice", "text.format holds the whole answer"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}}, "text.format", "text.format cannot be used: #"),
    ({"speculative": {"trace": True}, "stream": True}, "speculative.trace", "/v1/chat/completions"),
]


@pytest.mark.parametrize(("fields", "param", "part"), REFUSED, ids=[json.dumps(row[0])[:60] for row in REFUSED])
def test_what_cannot_be_served_is_refused_by_name(talker: Served, fields: dict[str, Any], param: str, part: str) -> None:
    text = json.dumps({"input": "Hi"} | fields)
    response = talker.http.post(talker.url + "/v1/responses", content=text, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert part in error["message"]
    assert error["param"] == param


def test_nothing_is_stored_and_the_server_says_so(talker: Served) -> None:
    response = talker.client.responses.create(model="toy", input="Hi", store=False)
    for call in (talker.client.responses.retrieve, talker.client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="responses are not stored"):
            call(response.id)  # type: ignore[operator]


def test_an_error_inside_a_stream_is_an_event() -> None:
    with serving(delay_s=0.02) as served:
        events = iter(served.client.responses.create(model="toy", input="Hi", max_output_tokens=200, stream=True))
        first: Any = next(events)
        (request_id,) = served.engine.describe_requests()
        served.runner.errors[request_id] = "a numerical failure"
        last: Any = list(events)[-1]
        assert last.type == "response.failed"
        assert last.response.id == first.response.id
        assert last.response.error.code == "server_error"
        assert "a numerical failure" in last.response.error.message
        served.wait_idle()
