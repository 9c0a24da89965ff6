"""Body: the base of all request models. A field is used, a documented no-op, neutral, or refused by name.

Owns: what happens to fields we do not use. Must not know: the routes' own fields (protocol.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from specdec.errors import RequestRejected


@dataclass(frozen=True, slots=True)
class NotServed:
    """A field others have and we do not: `neutral` values mean what we do anyway and pass, the rest is refused."""

    reason: str
    neutral: tuple[object, ...] = ()

    def accepts(self, value: object) -> bool:
        """True when leaving the field out would give the same answer."""
        return value is None or any(type(value) is type(same) and value == same for same in self.neutral)


# Labels and hints for OpenAI's own service. They cannot change the tokens, so they pass.
NO_OPS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
    }
)

NO_TOOLS = "tools go with /v1/chat/completions and /v1/responses"
NOT_SERVED: Mapping[str, NotServed] = {
    "tools": NotServed(NO_TOOLS, ([],)),
    "tool_choice": NotServed(NO_TOOLS, ("none", "auto")),
    "functions": NotServed("OpenAI replaced it by tools; send those", ([],)),
    "function_call": NotServed("OpenAI replaced it by tool_choice; send that", ("none", "auto")),
    "suffix": NotServed("fill-in-the-middle prompts are not built; write the model's own markers into prompt", ("",)),
    "prompt_embeds": NotServed("embeddings as prompt are not served; send text or token ids"),
    "use_beam_search": NotServed("beam search is not served; use best_of", (False,)),
    "length_penalty": NotServed("it belongs to beam search, which is not served", (1.0, 1)),
    "early_stopping": NotServed("it belongs to beam search, which is not served", (False,)),
    "modalities": NotServed("only text is served", (["text"],)),
    "audio": NotServed("only text is served"),
    "prediction": NotServed("predicted outputs are not served; the n-gram and suffix methods draft from the prompt itself"),
    "web_search_options": NotServed("this server has no web search"),
    "reasoning_effort": NotServed("pass what the model's template reads in chat_template_kwargs"),
    "include_reasoning": NotServed("it goes with /v1/chat/completions", (True,)),
    "thinking_token_budget": NotServed("reasoning is not counted apart; use max_tokens"),
    "continue_final_message": NotServed("send the rendered conversation to /v1/completions instead", (False,)),
    "documents": NotServed("put documents into a message", ([],)),
    "chat_template": NotServed("the model's own template is used; render the prompt yourself and send it to /v1/completions"),
    "truncate_prompt_tokens": NotServed("prompts are served whole or refused; shorten it before sending"),
    "truncation_side": NotServed("prompts are served whole or refused"),
    "spaces_between_special_tokens": NotServed("text is the tokenizer's own decoding", (True,)),
    "detokenize": NotServed("text is always returned; return_token_ids adds the ids", (True,)),
    "logprob_token_ids": NotServed("ask for logprobs instead"),
    "repetition_detection": NotServed("it is not built; use repetition_penalty or frequency_penalty"),
    "watermarking": NotServed("it is not built", (False,)),
    "return_tokens_as_token_ids": NotServed("use return_token_ids", (False,)),
    "return_weight_versions": NotServed("weights do not change here", (False,)),
    "stream_interval": NotServed("each step is one event here", (1,)),
    "cache_salt": NotServed("it is not built; the prefix cache shares blocks between equal prompts"),
    "session_id": NotServed("requests do not depend on one another here"),
    "kv_transfer_params": NotServed("caches are not transferred here"),
    "ec_transfer_params": NotServed("caches are not transferred here"),
    "vllm_xargs": NotServed("no extension reads it here", ({},)),
    "mm_processor_kwargs": NotServed("only text is served", ({},)),
    "logits_processors": NotServed("code in requests is not run; use logit_bias, bad_words or allowed_token_ids", ([],)),
}


class Body(BaseModel):
    """A request body or a part of one. Types are strict: "0.7" is no number and true is no integer.

    Raises:
        RequestRejected: while validating, when a field has no meaning here (all such fields in one message).
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", use_attribute_docstrings=True)  # which the reference prints

    no_ops: ClassVar[frozenset[str]] = frozenset()
    not_served: ClassVar[Mapping[str, NotServed]] = {}
    part_of: ClassVar[str] = ""  # "stream_options." for a nested model

    @model_validator(mode="before")
    @classmethod
    def refuse_unused_fields(cls, data: Any) -> Any:
        """Refuse what would be dropped in silence."""
        if not isinstance(data, dict):
            return data
        known = cls._wire_names()
        faults = [(name, fault) for name, value in data.items() if name not in known and (fault := cls._fault(str(name), value))]
        if faults:
            raise RequestRejected("; ".join(fault for _, fault in faults), param=cls.part_of + faults[0][0])
        return data

    @classmethod
    def _wire_names(cls) -> set[str]:
        return {info.alias or name for name, info in cls.model_fields.items()}

    @classmethod
    def _fault(cls, name: str, value: object) -> str | None:
        if name in cls.no_ops:
            return None
        entry = cls.not_served.get(name)
        if entry is not None:
            return None if entry.accepts(value) else f"{cls.part_of}{name} is not served: {entry.reason}"
        near = get_close_matches(name, [*cls._wire_names(), *cls.no_ops], n=1, cutoff=0.75)
        advice = f"did you mean `{near[0]}`?" if near else "remove it"
        return f"unknown field `{cls.part_of}{_shortened(name)}`: {advice}"


def _shortened(name: str) -> str:
    return name if len(name) <= 60 else name[:57] + "..."
