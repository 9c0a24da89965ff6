"""From a request body to SamplingParams: defaults, room in the context, and the one structured constraint.

Owns: the translation. Must not know: what the engine can do (admission.py), nor HTTP.
"""

from __future__ import annotations

import json
from typing import Any

from specdec.errors import RequestRejected
from specdec.sampling_params import SamplingParams, SpeculationParams, StructuredOutputParams
from specdec.server.answers.tools import NO_TOOLS, forced_schema
from specdec.server.openai_errors import ContextLengthExceeded
from specdec.server.protocol import ChatBody, CompletionBody, GenerationBody

MAX_TOP_LOGPROBS = 20


def completion_sampling(body: CompletionBody, *, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """Return the parameters of each choice of a completion; n is fanned out by the caller.

    max_tokens 0 with echo asks for the prompt's own log-probabilities: one token is drawn and not shown.
    """
    room = room_for(num_prompt_tokens, max_model_len=max_model_len)
    if body.max_tokens == 0 and body.echo:
        max_tokens = 1
    elif "max_tokens" in body.model_fields_set:
        max_tokens = fit(body.max_tokens, "max_tokens", room=room, num_prompt_tokens=num_prompt_tokens)
    else:
        max_tokens = min(body.max_tokens or room, room)
    needs_scores = body.best_of is not None and body.best_of > (body.n or 1)
    logprobs = 0 if body.logprobs is None and needs_scores else body.logprobs
    prompt_logprobs = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    return _sampling(body, max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def chat_sampling(body: ChatBody, *, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """Return the parameters of each choice of a chat answer; n is fanned out by the caller."""
    room = room_for(num_prompt_tokens, max_model_len=max_model_len, param="messages")
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    max_tokens = fit(asked, name, room=room, num_prompt_tokens=num_prompt_tokens)
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
        raise RequestRejected(f"top_logprobs is {body.top_logprobs}, but it must be in 0..{MAX_TOP_LOGPROBS}", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _sampling(body, max_tokens, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs)


def room_for(num_prompt_tokens: int, *, max_model_len: int, param: str = "prompt") -> int:
    """Return how many tokens fit after the prompt.

    Raises:
        ContextLengthExceeded: none does.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {max_model_len} tokens, but the prompt alone has {num_prompt_tokens} "
            "and at least one token must be generated",
            param=param,
            hint="shorten the prompt",
        )
    return room


def fit(asked: int | None, name: str, *, room: int, num_prompt_tokens: int) -> int:
    """Return the answer's length limit; None fills the context.

    Raises:
        ContextLengthExceeded: prompt and answer do not fit together.
    """
    if asked is None:
        return room
    if asked > room:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {room + num_prompt_tokens} tokens, but {num_prompt_tokens + asked} were asked for: "
            f"{num_prompt_tokens} in the prompt and {name} is {asked}",
            param=name,
            hint=f"set {name} to {room} or less, or leave it out to fill the context",
        )
    if asked < 1:
        raise RequestRejected(f"{name} is {asked}, but it must be at least 1", param=name)
    return asked


def _sampling(body: GenerationBody, max_tokens: int, *, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
    _check_text("stop", [body.stop] if isinstance(body.stop, str) else body.stop)
    _check_text("bad_words", body.bad_words)
    _check_min_tokens(body, max_tokens)
    return SamplingParams(
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=_or(body.top_k, 0),
        min_p=_or(body.min_p, 0.0),
        seed=body.seed,
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias={int(key): bias for key, bias in (body.logit_bias or {}).items()},
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_words=tuple(body.bad_words or ()),
        min_tokens=_or(body.min_tokens, 0),
        max_tokens=max_tokens,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=_or(body.skip_special_tokens, True),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured=structured_params(body),
        speculation=_speculation(body),
    )


def _check_min_tokens(body: GenerationBody, max_tokens: int) -> None:
    """Where the client set no limit, the context is the limit, and the message must not speak of a max_tokens that nobody sent."""
    asked, least = body.length_limit, body.min_tokens or 0
    if asked is None and least > max_tokens:
        raise RequestRejected(
            f"min_tokens is {least}, but only {max_tokens} tokens fit after the prompt",
            param="min_tokens",
            hint=f"set min_tokens to {max_tokens} or less",
        )
    if asked is not None and least > max_tokens:
        name, limit = asked
        raise RequestRejected(f"min_tokens is {least}, but it must not exceed {name}, which is {limit}", param="min_tokens")


def _or(value: Any, neutral: Any) -> Any:
    return neutral if value is None else value


def _check_text(name: str, texts: list[str] | None) -> None:
    for text in texts or ():
        if not text:
            raise RequestRejected(f"{name} must not contain an empty string", param=name)
        require_unicode(name, text)


def require_unicode(name: str, text: str) -> None:
    """Refuse lone surrogates: JSON can escape them, but no tokenizer can read them.

    Raises:
        RequestRejected: `text` has one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start]
        raise RequestRejected(
            f"{name} has the lone surrogate U+{ord(found):04X} at character {error.start}, but it must be Unicode text", param=name
        ) from None


def _speculation(body: GenerationBody) -> SpeculationParams:
    wish = body.speculative
    if wish is None:
        return SpeculationParams()
    if wish.num_speculative_tokens == 0:
        return SpeculationParams(enabled=False)
    return SpeculationParams(enabled=wish.enabled, num_speculative_tokens=wish.num_speculative_tokens, method=wish.method)


def structured_params(body: GenerationBody) -> StructuredOutputParams | None:
    """Return the one constraint on the text, None without any.

    Raises:
        RequestRejected: there are two, or structured_outputs is empty.
    """
    found = _constraints(body)
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise RequestRejected(f"{names} are given, but one request takes one constraint", param=found[1][0], hint="send one of them")
    if not found and body.structured_outputs is not None:
        raise RequestRejected(
            "structured_outputs names no constraint", param="structured_outputs", hint="send json, regex, choice, grammar or json_object"
        )
    return found[0][1] if found else None


def constraint_field(body: GenerationBody) -> str:
    """Return the field that holds the constraint on the text; "structured_outputs" where there is none."""
    found = _constraints(body)
    return found[0][0] if found else "structured_outputs"


def _constraints(body: GenerationBody) -> list[tuple[str, StructuredOutputParams]]:
    schema = body.response_format.json_schema if body.response_format else None
    is_json = body.response_format is not None and body.response_format.type == "json_object"
    nested = body.structured_outputs
    use = body.tool_use if isinstance(body, ChatBody) else NO_TOOLS
    candidates = [
        ("tools", StructuredOutputParams(json_schema=forced_schema(use)) if use.mode == "forced" else None),
        ("response_format", _json_schema(schema.schema_) if schema else StructuredOutputParams(json_object=True) if is_json else None),
        ("guided_json", _json_schema(body.guided_json)),
        ("guided_regex", _regex(body.guided_regex)),
        ("guided_choice", _choice(body.guided_choice)),
        ("guided_grammar", _grammar(body.guided_grammar)),
    ]
    if nested is not None:
        candidates += [
            ("structured_outputs.json", _json_schema(nested.json_)),
            ("structured_outputs.json_object", StructuredOutputParams(json_object=True) if nested.json_object else None),
            ("structured_outputs.regex", _regex(nested.regex)),
            ("structured_outputs.choice", _choice(nested.choice)),
            ("structured_outputs.grammar", _grammar(nested.grammar)),
        ]
    return [(name, constraint) for name, constraint in candidates if constraint is not None]


def _json_schema(schema: dict[str, Any] | str | None) -> StructuredOutputParams | None:
    if schema is None:
        return None
    return StructuredOutputParams(json_schema=schema if isinstance(schema, str) else json.dumps(schema))


def _regex(pattern: str | None) -> StructuredOutputParams | None:
    return None if pattern is None else StructuredOutputParams(regex=pattern)


def _choice(choices: list[str] | None) -> StructuredOutputParams | None:
    return None if choices is None else StructuredOutputParams(choice=tuple(choices))


def _grammar(grammar: str | None) -> StructuredOutputParams | None:
    return None if grammar is None else StructuredOutputParams(grammar=grammar)
