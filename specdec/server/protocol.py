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
    """One more event with the usage of the whole answer."""
    continuous_usage_stats: bool = False
    """Usage so far in every event."""


class Speculative(Body):
    """Drafting for this request, within what the server runs. trace: a stream also tells which tokens were accepted drafts."""

    part_of: ClassVar[str] = "speculative."

    enabled: bool = True
    """False: no drafts for this request."""
    num_speculative_tokens: int | None = Field(default=None, ge=0)
    """Drafts per step at most, within what the server runs; 0 is `enabled: false`."""
    method: str | None = None
    """Draft with this one of the server's sources only."""
    trace: bool = False
    """Each event also tells which of its tokens were accepted drafts, and of which source; streams only."""


class StructuredOutputs(Body):
    """Exactly one constraint on the text."""

    part_of: ClassVar[str] = "structured_outputs."

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")  # `json` and `schema` are methods of pydantic models
    """JSON schema, as an object or as JSON text."""
    json_object: bool | None = None
    """True: any JSON object."""
    regex: str | None = None
    """Regular expression that the whole text matches."""
    choice: list[str] | None = None
    """Texts of which one is the answer."""
    grammar: str | None = None
    """Context-free grammar in EBNF; it begins at `root`."""


class JsonSchemaFormat(Body):
    """The named schema inside response_format."""

    part_of: ClassVar[str] = "response_format.json_schema."
    no_ops: ClassVar[frozenset[str]] = frozenset({"description", "strict", "name"})

    schema_: dict[str, Any] = Field(alias="schema")
    """JSON schema of the answer; it is always enforced."""


class ResponseFormat(Body):
    """OpenAI's response_format."""

    part_of: ClassVar[str] = "response_format."

    type: Literal["text", "json_object", "json_schema"]
    """Form of the text."""
    json_schema: JsonSchemaFormat | None = None
    """The schema; with type `json_schema` only."""

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
    """Name of the served model; left out: that model."""
    n: int | None = None
    """Answers to each prompt, 1 to 128; null is 1. With a seed, answer i is drawn with seed + i."""
    temperature: float | None = None
    """0 to 100; 0 takes the most likely token; null is 1."""
    top_p: float | None = None
    """Above 0, up to 1: the least set of likeliest tokens that has this much probability; null is 1."""
    top_k: int | None = None
    """The k likeliest tokens; 0, -1 and null: all."""
    min_p: float | None = None
    """0 to 1: tokens with at least this share of the likeliest one's probability; null is 0."""
    seed: int | None = None
    """64 bits; the same seed gives the same tokens, alone or among others, with drafts or without."""
    frequency_penalty: float | None = None
    """-2 to 2: subtracted from a token's logit once for each time the answer has it; null is 0."""
    presence_penalty: float | None = None
    """-2 to 2: subtracted once if the answer has the token; null is 0."""
    repetition_penalty: float | None = None
    """0.01 to 100: above 1, tokens that prompt or answer have become less likely; null is 1."""
    logit_bias: dict[str, float] | None = None
    """Token id to -100..100, added to its logit."""
    allowed_token_ids: list[int] | None = None
    """Only these tokens may come."""
    bad_words: list[str] | None = None
    """Texts that may not come."""
    min_tokens: int | None = None
    """No end before so many tokens; null is 0."""
    stop: str | list[str] | None = None
    """Texts that end the answer where they begin."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the answer."""
    include_stop_str_in_output: bool | None = None
    """True: the text that ended the answer is shown."""
    ignore_eos: bool | None = None
    """True: the model's own end is a token like any other."""
    skip_special_tokens: bool | None = None
    """False: special tokens are shown in the text; null is true."""
    prompt_logprobs: int | None = None
    """Log-probabilities of the prompt's tokens, with 0 to 20 alternatives each."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds the model's opening tokens; null: to a prompt, not to a conversation, whose template has them."""
    response_format: ResponseFormat | None = None
    """Form of the text, as OpenAI names it."""
    structured_outputs: StructuredOutputs | None = None
    """One constraint on the text, as vLLM names it."""
    guided_json: dict[str, Any] | str | None = None
    """The same as `structured_outputs.json`, by its older name."""
    guided_regex: str | None = None
    """The same as `structured_outputs.regex`, by its older name."""
    guided_choice: list[str] | None = None
    """The same as `structured_outputs.choice`, by its older name."""
    guided_grammar: str | None = None
    """The same as `structured_outputs.grammar`, by its older name."""
    priority: int | None = None
    """Lower is sooner; other values than 0 need `--scheduling-policy priority`."""
    request_id: str | None = Field(default=None, pattern=r"^[!-~]{1,128}$")
    """Becomes part of the answer's id: up to 128 visible ASCII characters."""
    stream: bool | None = None
    """True: the answer comes as server-sent events while it is made."""
    stream_options: StreamOptions | None = None
    """What a stream tells beside the text; with `stream: true` only."""
    return_token_ids: bool | None = None
    """True: the ids of prompt and answer too."""
    speculative: Speculative | None = None
    """Drafting for this request, within what the server runs."""
    per_request_spec_decode_metrics: SpecMetricsLevel | None = None
    """How much `metrics.speculative_decoding` of the answer tells; null: what the server was started with."""

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
    """Text or token ids, or a list of such, each with an answer of its own."""
    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    """Tokens of the answer at most; null: what the context holds. 0 with `echo` asks for the prompt's log-probabilities alone."""
    logprobs: int | None = None
    """Log-probabilities of the tokens, with 0 to 20 alternatives each."""
    echo: bool | None = None
    """True: the prompt stands before the answer."""
    best_of: int | None = Field(default=None, ge=1, le=128)
    """Draw so many and show the `n` of highest log-probability per token."""

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
    """Who speaks; `developer` is `system`."""
    content: str | None = None
    """Text, or parts of type `text`, which are joined by line feeds; null only beside `tool_calls`."""
    name: str | None = None
    """Who it is among those of one role, for templates that tell."""
    tool_call_id: str | None = None
    """The call that a message of role `tool` answers."""
    tool_calls: list[MessageCall] | None = None
    """What the assistant called."""
    reasoning_content: str | None = None
    """The assistant's reasoning, for templates that show it."""

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
    """The conversation."""
    max_tokens: int | None = None
    """Tokens of the answer at most; null: what the context holds."""
    max_completion_tokens: int | None = None
    """The same by its newer name."""
    logprobs: bool | None = None
    """True: log-probabilities of the tokens."""
    top_logprobs: int | None = None
    """0 to 20 alternatives for each token; with `logprobs: true` only."""
    add_generation_prompt: bool | None = None
    """False: the template does not begin the assistant's turn; null is true."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    include_reasoning: bool | None = None
    """False: reasoning is left out of the answer; null is true."""

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
    """Name of the served model; left out: that model."""
    prompt: str | None = None
    """Text; this or `messages`."""
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    """Conversation, rendered by the chat template first."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds the model's opening tokens to `prompt`."""
    add_generation_prompt: bool = True
    """Whether the template begins the assistant's turn."""
    return_token_strs: bool = False
    """True: the text of each token too."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""

    @model_validator(mode="after")
    def need_one_text(self) -> TokenizeBody:
        """A prompt or messages."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestRejected("prompt and messages: send exactly one of them", param="prompt")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    """Name of the served model; left out: that model."""
    tokens: list[int]
    """Token ids."""
    skip_special_tokens: bool = False
    """True: special tokens are left out."""


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
