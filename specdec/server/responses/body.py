"""The body of /v1/responses, and what it asks for as a chat body, so that both routes are served by the same code.

Owns: names and shapes of its fields, and what is refused because nothing is stored here.
Must not know: engines, answers. Read next: items.py (input), answer.py (output).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from specdec.errors import RequestRejected
from specdec.server.fields import Body, NotServed
from specdec.server.protocol import ChatBody, JsonSchemaFormat, ResponseFormat, Speculative
from specdec.server.responses.items import messages_of
from specdec.server.tool_bodies import NAME, FunctionTool, Tool, TypedTool

NOT_STORED = "responses are not stored here"
NOT_SERVED: Mapping[str, NotServed] = {
    "previous_response_id": NotServed(f"{NOT_STORED}; send the earlier items in input"),
    "conversation": NotServed(f"{NOT_STORED}; send the earlier items in input"),
    "background": NotServed(f"{NOT_STORED}, so nothing could be fetched later", (False,)),
    "prompt": NotServed(f"prompt templates and {NOT_STORED}; send instructions and input"),
    "include": NotServed("output holds all there is; ask /v1/chat/completions for log-probabilities", ([],)),
    "top_logprobs": NotServed("ask /v1/chat/completions for log-probabilities", (0,)),
    "max_tool_calls": NotServed("it counts calls of built-in tools, and there are none here"),
    "truncation": NotServed("prompts are served whole or refused; shorten input before sending", ("disabled",)),
    "context_management": NotServed("prompts are served whole or refused; shorten input before sending", ([],)),
    "reasoning": NotServed(
        "pass what the model's template reads in chat_template_kwargs", ({}, {"effort": None}, {"effort": None, "summary": None})
    ),
    "image": NotServed("only text is served"),
    "modalities": NotServed("only text is served", (["text"],)),
    "n": NotServed("a response has one answer; send several requests", (1,)),
    "messages": NotServed("it is called input here"),
    "max_tokens": NotServed("it is called max_output_tokens here"),
    "response_format": NotServed("it is called text.format here"),
}
NO_OPS = frozenset({"user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"})
CHOICES = "'none', 'auto', 'required' or {'type': 'function', 'name': ...}"


class FlatTool(TypedTool, FunctionTool):
    """A function, whose members stand beside its type here."""

    part_of: ClassVar[str] = "tools."


class FlatChoice(Body):
    """tool_choice as an object."""

    part_of: ClassVar[str] = "tool_choice."

    type: Literal["function"]
    """Always `function`."""
    name: str = Field(pattern=NAME)
    """One of `tools`."""


class TextFormat(Body):
    """What form the text has: as response_format of chat, the members of json_schema beside the type.

    name, description and strict are given back in the response and change nothing: a schema is always kept.
    """

    part_of: ClassVar[str] = "text.format."

    name: str | None = None
    """Given back in the response."""
    description: str | None = None
    """Given back in the response."""
    strict: bool | None = None
    """Given back in the response; a schema is always kept."""
    type: Literal["text", "json_object", "json_schema"] = "text"
    """Form of the text."""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """JSON schema of the text; with type `json_schema`, and only with it."""

    @model_validator(mode="after")
    def need_the_schema(self) -> TextFormat:
        """Type and schema must agree."""
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise RequestRejected(
                f"text.format.type is {self.type!r}; schema goes with 'json_schema', and only with it", param="text.format"
            )
        return self


class TextOptions(Body):
    """The member `text`."""

    part_of: ClassVar[str] = "text."
    no_ops: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat | None = None
    """Form of the text; left out: plain text."""


class StreamOptions(Body):
    """Usage always comes with the last event; padding is for OpenAI's own service and passes."""

    part_of: ClassVar[str] = "stream_options."
    no_ops: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})


class ResponsesBody(Body):
    """POST /v1/responses."""

    no_ops: ClassVar[frozenset[str]] = NO_OPS
    not_served: ClassVar[Mapping[str, NotServed]] = NOT_SERVED

    model: str | None = None
    """Name of the served model; left out: that model."""
    input: str | list[dict[str, Any]]
    """A user's text, or items: messages, function calls, their outputs, reasoning."""
    instructions: str | None = None
    """The first system message."""
    max_output_tokens: int | None = None
    """Tokens of the answer at most; null: what the context holds."""
    temperature: float | None = None
    """0 to 100; 0 takes the most likely token; null is 1."""
    top_p: float | None = None
    """Above 0, up to 1: the least set of likeliest tokens that has this much probability; null is 1."""
    stream: bool | None = None
    """True: the response comes as OpenAI's events while it is made."""
    stream_options: StreamOptions | None = None
    """Nothing here changes the stream."""
    store: bool | None = None
    """Nothing is stored; true is refused."""
    metadata: dict[str, str] | None = None
    """Given back in the response."""
    text: TextOptions | None = None
    """Form of the text."""
    tools: list[FlatTool] | None = None
    """What the model may call."""
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    """`none`, `auto`, `required`, or the function that must be called; null is `auto`."""
    parallel_tool_calls: bool | None = None
    """False: one call at most; null is true."""
    top_k: int | None = None
    """The k likeliest tokens; 0, -1 and null: all."""
    min_p: float | None = None
    """0 to 1: tokens with at least this share of the likeliest one's probability; null is 0."""
    seed: int | None = None
    """64 bits; the same seed gives the same tokens, with drafts or without."""
    frequency_penalty: float | None = None
    """-2 to 2: subtracted from a token's logit once for each time the answer has it; null is 0."""
    presence_penalty: float | None = None
    """-2 to 2: subtracted once if the answer has the token; null is 0."""
    repetition_penalty: float | None = None
    """0.01 to 100: above 1, tokens that prompt or answer have become less likely; null is 1."""
    stop: str | list[str] | None = None
    """Texts that end the answer where they begin."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    priority: int | None = None
    """Lower is sooner; other values than 0 need `--scheduling-policy priority`."""
    request_id: str | None = Field(default=None, pattern=r"^[!-~]{1,128}$")
    """Becomes part of the response's id: up to 128 visible ASCII characters."""
    speculative: Speculative | None = None
    """Drafting for this request; all of it but `trace`."""

    @field_validator("input", mode="before")
    @classmethod
    def name_the_shapes(cls, value: Any) -> Any:
        """One sentence instead of pydantic's report on every arm of the union."""
        if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(item, dict) for item in value)):
            return value
        raise ValueError(f"input is {repr(value)[:60]}, but it must be a string or a list of items (objects), and not empty")

    @field_validator("tool_choice", mode="before")
    @classmethod
    def name_the_choices(cls, value: Any) -> Any:
        """The same for tool_choice."""
        if value is None or value in ("none", "auto", "required") or (isinstance(value, dict) and value.get("type") == "function"):
            return value
        raise ValueError(f"tool_choice is {repr(value)[:60]}, but it must be {CHOICES}")

    @model_validator(mode="after")
    def keep_no_promise(self) -> ResponsesBody:
        """OpenAI stores responses unless told otherwise; here store means false, and an explicit true cannot be kept."""
        if self.store:
            raise RequestRejected(
                f"store is true, but {NOT_STORED}", param="store", hint="send false, or leave it out, which means the same here"
            )
        if self.speculative is not None and self.speculative.trace:
            raise RequestRejected("speculative.trace is true, but it goes with /v1/chat/completions", param="speculative.trace")
        return self

    def as_chat(self) -> ChatBody:
        """Return the chat body that asks for the same.

        Raises:
            RequestRejected: a part of it cannot be served; the names are those of this body.
        """
        try:
            return ChatBody(**self._chat_fields())
        except RequestRejected as error:
            raise in_our_words(error) from None

    def _chat_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages_of(self.input, self.instructions),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._response_format(),
            "tools": [Tool(type="function", function=FunctionTool(**tool.model_dump(exclude={"type"}))) for tool in self.tools or ()]
            or None,
            "tool_choice": self._tool_choice(),
        }
        for name in _SAME:
            fields[name] = getattr(self, name)
        return fields

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, FlatChoice) else choice

    def _response_format(self) -> ResponseFormat | None:
        asked = self.text.format if self.text else None
        if asked is None:
            return None
        schema = None if asked.schema_ is None else JsonSchemaFormat(schema=asked.schema_)
        return ResponseFormat(type=asked.type, json_schema=schema)


_SAME = (
    *("temperature", "top_p", "parallel_tool_calls", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "stop", "chat_template_kwargs", "priority", "request_id", "speculative", "stream"),
)
_WORDS = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format", "messages": "input"}


def in_our_words(error: RequestRejected) -> RequestRejected:
    """Return the refusal of a chat body with the names of this body."""
    message, param = error.message, error.param
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
        param = ours if param == theirs else param
    return type(error)(message, param=param, hint=error.hint)
