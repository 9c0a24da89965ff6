"""The request bodies of the OpenAI routes, with vLLM's extra fields and our `speculative` object.

Owns: names, types and shapes of fields. Must not know: the engine (sampling.py translates), nor what it can do (admission.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, SkipValidation, field_validator, model_validator

from specdec.errors import RequestRejected
from specdec.server.fields import NO_OPS, NOT_SERVED, Body, NotServed
from specdec.server.options import SpecMetricsLevel
from specdec.server.tool_bodies import MessageCall, ToolFields

DEFAULT_COMPLETION_TOKENS = 16  # what OpenAI documents for /v1/completions; null asks for the whole context


class StreamOptions(Body):
    """When a stream reports usage. `include_obfuscation` pads events for OpenAI's own service and passes."""

    part_of: ClassVar[str] = "stream_options."
    no_ops: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculative(Body):
    """Drafting for this request, within what the server runs. trace: a stream also tells which tokens were accepted drafts."""

    part_of: ClassVar[str] = "speculative."

    enabled: bool = True
    num_speculative_tokens: int | None = Field(default=None, ge=0)
    method: str | None = None
    trace: bool = False


class StructuredOutputs(Body):
    """Exactly one constraint on the text."""

    part_of: ClassVar[str] = "structured_outputs."

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")  # `json` and `schema` are methods of pydantic models
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class JsonSchemaFormat(Body):
    """The named schema inside response_format."""

    part_of: ClassVar[str] = "response_format.json_schema."
    no_ops: ClassVar[frozenset[str]] = frozenset({"description", "strict", "name"})

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """OpenAI's response_format."""

    part_of: ClassVar[str] = "response_format."

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def need_the_schema(self) -> ResponseFormat:
        """Type and content must agree."""
        if self.type == "json_schema" and self.json_schema is None:
            raise RequestRejected("response_format.type is 'json_schema', but json_schema is missing", param="response_format.json_schema")
        if self.type != "json_schema" and self.json_schema is not None:
            rule = f"response_format.json_schema is given, but it goes with type 'json_schema', and type is {self.type!r}"
            raise RequestRejected(rule, param="response_format.json_schema")
        return self


class GenerationBody(Body):
    """Fields that both routes share. None and the neutral value mean the same everywhere."""

    no_ops = NO_OPS
    not_served = NOT_SERVED

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: int | None = None
    request_id: str | None = Field(default=None, pattern=r"^[!-~]{1,128}$")  # becomes part of the answer's id
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    speculative: Speculative | None = None
    per_request_spec_decode_metrics: SpecMetricsLevel | None = None

    @property
    def length_limit(self) -> tuple[str, int] | None:
        """The field that limits the answer's length and its value, None where the client set none."""
        return None

    @field_validator("logit_bias")
    @classmethod
    def need_token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        """JSON has only text keys."""
        for key in value or {}:
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise ValueError(f"logit_bias has the key {key!r}, but keys must be token ids, such as '50'")
        return value

    @model_validator(mode="after")
    def need_a_stream_for_its_options(self) -> GenerationBody:
        """What only streams carry would be dropped in silence."""
        if self.stream_options is not None and not self.stream:
            raise RequestRejected("stream_options is given, but it goes with stream: true only", param="stream_options")
        if self.speculative is not None and self.speculative.trace and not self.stream:
            raise RequestRejected("speculative.trace is true, but it goes with stream: true only", param="speculative.trace")
        return self


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: SkipValidation[str | list[str] | list[int] | list[list[int]]]  # the validator below has seen every item
    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1, le=128)

    @property
    def length_limit(self) -> tuple[str, int] | None:
        """max_tokens, its default included; None where it is null."""
        return None if self.max_tokens is None else ("max_tokens", self.max_tokens)

    @field_validator("prompt", mode="before")
    @classmethod
    def name_the_shapes(cls, value: Any) -> Any:
        """One sentence instead of pydantic's report on every arm of the union."""
        if isinstance(value, str) or (isinstance(value, list) and value and _is_prompt_list(value)):
            return value
        rule = "a string, a list of strings, a list of token ids, or a list of lists of token ids, and not empty"
        raise ValueError(f"prompt is {_shortened(value)}, but it must be {rule}")

    @model_validator(mode="after")
    def need_room_for_best_of(self) -> CompletionBody:
        """best_of draws candidates first and can show nothing before all are done."""
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise RequestRejected(f"best_of is {self.best_of}, but it must be at least n, which is {n}", param="best_of")
        if self.best_of is not None and self.best_of > n and self.stream:
            raise RequestRejected(f"best_of is {self.best_of}, but with stream: true it must equal n, which is {n}", param="best_of")
        return self


class ChatMessage(Body):
    """One message. Content parts of type text are joined; other parts are refused."""

    part_of: ClassVar[str] = "messages."
    no_ops: ClassVar[frozenset[str]] = frozenset({"refusal", "annotations"})
    not_served: ClassVar[Mapping[str, NotServed]] = {"audio": NOT_SERVED["audio"], "function_call": NOT_SERVED["function_call"]}

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MessageCall] | None = None
    reasoning_content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def join_text_parts(cls, value: Any) -> Any:
        """Templates read plain text."""
        return "\n".join(_part_text(part) for part in value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def need_content(self) -> ChatMessage:
        """Only an assistant that called tools may stay silent."""
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise RequestRejected(f"content of a message with role {self.role!r} is null, but it must be text", param="messages")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return what chat templates read: content is always text, and the newer name of the system role the old one."""
        fields = {key: value for key, value in self.model_dump(exclude_unset=True, exclude={"tool_calls"}).items() if value is not None}
        if self.tool_calls:
            fields["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return fields | {"content": self.content or ""} | {"role": "system" if self.role == "developer" else self.role}


class ChatBody(ToolFields, GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None

    @property
    def length_limit(self) -> tuple[str, int] | None:
        """max_completion_tokens, or max_tokens; None where neither is set."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return None if self.max_tokens is None else ("max_tokens", self.max_tokens)

    @model_validator(mode="after")
    def agree_with_itself(self) -> ChatBody:
        """Two fields for one thing must not contradict one another."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestRejected(f"top_logprobs is {self.top_logprobs}, but it goes with logprobs: true only", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestRejected(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}; send one of them",
                param="max_tokens",
            )
        return self


class TokenizeBody(ToolFields):
    """POST /tokenize: of a prompt or of a conversation, with the tools that a request to /v1/chat/completions would have."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def need_one_text(self) -> TokenizeBody:
        """A prompt or messages."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestRejected("prompt and messages: send exactly one of them", param="prompt")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_prompt_list(value: list[Any]) -> bool:
    def is_ids(item: object) -> bool:
        return isinstance(item, list) and bool(item) and all(type(token_id) is int for token_id in item)

    return is_ids(value) or all(isinstance(item, str) for item in value) or all(is_ids(item) for item in value)


def _part_text(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"a part of messages.content has type {kind!r}, but only {{'type': 'text', 'text': ...}} is served")
