"""Texts of models read as reasoning, content and calls: what is written by hand here, however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import ConfigError
from specdec.server.answers.calls import CallReader, Forced, Hermes, Llama3, Mistral
from specdec.server.answers.formats import detected, formats_for
from specdec.server.answers.message import Message, delta_json, finish_reason, message_json, read_whole
from specdec.server.answers.reader import AnswerPlan
from specdec.server.answers.reasoning import FORMATS, begins_inside

Calls = list[tuple[str, dict[str, Any]]]
TOOLS = ("weather", "time", "f")
PARIS: Calls = [("weather", {"city": "Paris"})]
WEATHER = '{"name": "weather", "arguments": {"city": "Paris"}}'

CASES: list[tuple[type[CallReader], str, str, Calls]] = [
    (Hermes, "No call here.", "No call here.", []),
    (Hermes, "Trailing space stays. \n", "Trailing space stays. \n", []),
    (Hermes, f"<tool_call>\n{WEATHER}\n</tool_call>", "", PARIS),
    (Hermes, f"Let me look.\n\n<tool_call>{WEATHER}</tool_call>\n", "Let me look.\n", PARIS),
    (Hermes, f"<tool_call>{WEATHER}</tool_call>\n<tool_call>" + '{"name":"time","arguments":{}}</tool_call>', "", [*PARIS, ("time", {})]),
    (Hermes, f"a <tool_call>{WEATHER}</tool_call> b <tool_call>{WEATHER}</tool_call> c", "a b c", PARIS * 2),
    (Hermes, f"<tool_call>{WEATHER}", "", PARIS),  # no closing tag
    (Hermes, f"<tool_call>{WEATHER} and on", " and on", PARIS),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"s": "</tool_call> \\" } {"}}</tool_call>', "", [("f", {"s": '</tool_call> " } {'})]),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"s": "日本 🎉 \\u00e9"}}</tool_call>', "", [("f", {"s": "日本 🎉 é"})]),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"s": "\\ud83d"}}</tool_call>', "", [("f", {"s": "\ud83d"})]),
    (Hermes, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    (Hermes, '<tool_call>{"arguments": {"a": [1, {"b": 2}]}, "name": "f"}</tool_call>', "", [("f", {"a": [1, {"b": 2}]})]),
    (Hermes, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
    (Hermes, "<tool_call>none</tool_call>", "<tool_call>none</tool_call>", []),
    (Hermes, "<tool_call>{'name': 'f'}</tool_call>", "<tool_call>{'name': 'f'}</tool_call>", []),
    (Hermes, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', []),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a": NaN}}', '<tool_call>{"name": "f", "arguments": {"a": NaN}}', []),
    (Hermes, '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),  # cut by max_tokens
    (Hermes, "1 < 2 <tool", "1 < 2 <tool", []),
    (Hermes, f"<tool_call><tool_call>{WEATHER}</tool_call>", "<tool_call>", PARIS),
    (Llama3, '{"name": "weather", "parameters": {"city": "Paris"}}', "", PARIS),
    (Llama3, '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', "", PARIS),
    (Llama3, f'{WEATHER}; {{"name": "time", "parameters": {{}}}}', "", [*PARIS, ("time", {})]),
    (Llama3, f"{WEATHER};\n", "", PARIS),
    (Llama3, '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    (Llama3, '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    (Llama3, "The answer is {4}.", "The answer is {4}.", []),
    (Llama3, "<|python", "<|python", []),
    (Llama3, '  {"name": "f", "parameters": {', '  {"name": "f", "parameters": {', []),
    (Llama3, f"{WEATHER} Done. ", " Done. ", PARIS),
    (Mistral, f"[TOOL_CALLS][{WEATHER}]", "", PARIS),
    (Mistral, f"[TOOL_CALLS] [{WEATHER}, " + '{"name": "time", "arguments": {}}]', "", [*PARIS, ("time", {})]),
    (Mistral, 'I look.[TOOL_CALLS]weather{"city": "Paris"}', "I look.", PARIS),
    (Mistral, '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]time[ARGS]{}', "", [*PARIS, ("time", {})]),
    (Mistral, '[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{"city": "Paris"}', "", PARIS),
    (Mistral, "[TOOL_CALLS]what now?", "[TOOL_CALLS]what now?", []),
    (Mistral, "[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]", []),
    (Mistral, "[TOOL_CALLS]" + "x" * 300, "[TOOL_CALLS]" + "x" * 300, []),
    (Mistral, "a [TOOL", "a [TOOL", []),
    (Forced, f"[{WEATHER}]", "", PARIS),
    (Forced, f"[ {WEATHER} ,\n" + '{"name":"f","arguments":{"s":"}]\\"{"}} ]', "", [*PARIS, ("f", {"s": '}]"{'})]),
    (Forced, '[{"name": "f", "arguments": {}}]', "", [("f", {})]),
]


def joined(reader: CallReader, pieces: list[str]) -> tuple[str, Calls]:
    """Feed the pieces and return content and calls, as a client joins the deltas of its stream."""
    plan = AnswerPlan(calls=type(reader))
    message = Message()
    for text in [*pieces, None]:
        found = reader.finish() if text is None else reader.feed(text)
        message.add(found)
        assert all(piece.text for piece in found if hasattr(piece, "text")), "an empty piece"
        for call in delta_json(found, plan).get("tool_calls", ()):
            assert call["function"]["arguments"] or "id" in call
    return message.content, [(call.name, json.loads(call.arguments)) for call in message.calls]


def bursts(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_text_is_read_the_same_however_it_is_cut(kind: type[CallReader], text: str, content: str, calls: Calls) -> None:
    for pieces in [[text], *(bursts(text, size) for size in range(1, 9)), *([text[:at], text[at:]] for at in range(1, len(text)))]:
        assert joined(kind(TOOLS), pieces) == (content, calls), pieces


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_the_same_in_random_cuts(data: st.DataObject) -> None:
    """Texts made of the parts that the formats know, in no sensible order."""
    kind = data.draw(st.sampled_from([Hermes, Llama3, Mistral]))
    parts = [
        "<tool_call>",
        "</tool_call>",
        WEATHER,
        "[TOOL_CALLS]",
        "[",
        "]",
        "<|python_tag|>",
        " ",
        "\n",
        "weather",
        "{",
        '"',
        "\\",
        "}",
        ";",
        "<",
        "é",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, calls = joined(kind(TOOLS), [text])
    assert joined(kind(TOOLS), pieces) == (content, calls)
    if not calls:
        assert content == text, "without a call nothing may be lost"


def test_calls_of_a_grammar_stream_while_they_grow() -> None:
    reader = Forced(TOOLS)
    head = delta_json(reader.feed('[{"name": "f", "arguments": '), AnswerPlan(calls=Forced))
    assert head == {}, "the arguments might still be of another kind"
    first = delta_json(reader.feed('{"a": "lon'), AnswerPlan(calls=Forced))["tool_calls"][0]
    assert first["function"] == {"name": "f", "arguments": '{"a": "lon'}
    assert first["id"].startswith("call_")
    assert delta_json(reader.feed("g"), AnswerPlan(calls=Forced))["tool_calls"] == [{"index": 0, "function": {"arguments": "g"}}]
    assert reader.finish() == []


def test_one_call_at_a_time_keeps_the_first() -> None:
    text = f"<tool_call>{WEATHER}</tool_call>" + '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    reader = Hermes(TOOLS, is_parallel=False)
    assert joined(reader, [text]) == ("", PARIS)


def test_ids_are_unlike_and_mistrals_have_nine_characters() -> None:
    def ids(kind: type[CallReader], text: str) -> list[str]:
        return [call.id for call in read_whole(text, AnswerPlan(calls=kind, tool_names=TOOLS)).calls]

    two = ids(Mistral, f"[TOOL_CALLS][{WEATHER}, {WEATHER}]")
    assert len(set(two)) == 2
    assert all(len(id) == 9 and id.isalnum() for id in two)
    assert len(set(ids(Llama3, f"{WEATHER};{WEATHER}"))) == 2


THOUGHTS: list[tuple[str, str, str, str, str]] = [  # parser, end of the prompt, text, reasoning, content
    ("qwen3", "assistant\n", "<think>\nWell, 2 < 3.\n</think>\n\nYes.", "Well, 2 < 3.", "Yes."),
    ("qwen3", "assistant\n", "Yes. </think>", "", "Yes. </think>"),
    ("qwen3", "assistant\n", "  Yes.", "", "  Yes."),
    ("qwen3", "<think>\n", "Hm.</think>Yes.", "Hm.", "Yes."),
    ("qwen3", "<think>\n", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("qwen3", "<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
    ("qwen3", "assistant\n", "<think></think>Yes.", "", "Yes."),
    ("qwen3", "assistant\n", "<think>never closed </thi", "never closed </thi", ""),
    ("qwen3", "assistant\n", "<thin", "", "<thin"),
    ("qwen3", "assistant\n", "", "", ""),
    ("deepseek_r1", "assistant", "Hm. </think> Yes.\n", "Hm.", "Yes.\n"),
    ("deepseek_r1", "assistant", "All of it", "All of it", ""),
    ("deepseek_r1", "<think>\n</think>", "Yes.", "", "Yes."),
]


@pytest.mark.parametrize(("parser", "prompt", "text", "reasoning", "content"), THOUGHTS)
def test_reasoning_is_split_off_however_the_text_is_cut(parser: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    plan = AnswerPlan(reads_reasoning=True, begins_inside=begins_inside(FORMATS[parser], prompt))
    for pieces in [[text], *(bursts(text, size) for size in range(1, 9)), *([text[:at], text[at:]] for at in range(1, len(text)))]:
        reader, message = plan.reader(), Message()
        for piece in pieces:
            message.add(reader.feed(piece))
        message.add(reader.finish())
        assert (message.reasoning, message.content) == (reasoning, content), pieces


def test_calls_come_after_reasoning_and_not_out_of_it() -> None:
    text = f"<think>I could <tool_call>{WEATHER}</tool_call></think>\n<tool_call>{WEATHER}</tool_call>"
    plan = AnswerPlan(calls=Hermes, tool_names=TOOLS, reads_reasoning=True)
    message = read_whole(text, plan)
    assert message.reasoning == f"I could <tool_call>{WEATHER}</tool_call>"
    assert [call.name for call in message.calls] == ["weather"]
    shown = message_json(message, plan)
    assert shown["content"] is None
    assert shown["reasoning_content"] == message.reasoning
    assert "reasoning_content" not in message_json(message, AnswerPlan(reads_reasoning=True, shows_reasoning=False))


def test_finish_reasons_are_openais() -> None:
    chosen, named = AnswerPlan(calls=Hermes), AnswerPlan(calls=Forced, is_named=True)
    assert finish_reason("stop", chosen, has_calls=True) == "tool_calls"
    assert finish_reason("stop", chosen, has_calls=False) == "stop"
    assert finish_reason("length", chosen, has_calls=True) == "length"
    assert finish_reason("stop", named, has_calls=True) == "stop"


@pytest.mark.parametrize(
    ("template", "model_type", "name"),
    [
        ("{{ messages }}", "llama", "hermes"),
        ("{{ tools }} <tool_call>", "qwen2", "hermes"),
        ("{{ tools }} Environment: ipython", "llama", "llama3_json"),
        ("{{ tools }} <|python_tag|>", "llama", "llama3_json"),
        ("[AVAILABLE_TOOLS]{{ tools }}", "mistral", "mistral"),
        ("{{ tools }}", "mistral", "mistral"),
        ("{{ tools }}", "deepseek_v3", None),
    ],
)
def test_the_template_gives_the_format_away(template: str, model_type: str, name: str | None) -> None:
    assert detected(template, model_type) == name


def test_parsers_that_do_not_exist_stop_the_start() -> None:
    common = {"may_choose": True, "template": "", "model_type": "llama"}
    with pytest.raises(ConfigError, match="tool_call_parser is 'pythonic', but it must be one of auto, hermes"):
        formats_for(parser="pythonic", reasoning_parser=None, **common)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="reasoning_parser is 'x', but it must be one of qwen3"):
        formats_for(parser="auto", reasoning_parser="x", **common)  # type: ignore[arg-type]
