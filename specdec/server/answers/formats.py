"""AnswerFormats: how this model writes calls and reasoning, told by options or found in its chat template.

Owns: the names of parsers and what gives a format away. Must not know: requests. Read next: tools.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.errors import ConfigError
from specdec.server.answers.calls import CallReader, Hermes, Llama3, Mistral
from specdec.server.answers.reasoning import FORMATS, ReasoningFormat

CALL_READERS: dict[str, type[CallReader]] = {"hermes": Hermes, "llama3_json": Llama3, "mistral": Mistral}
AUTO = "auto"
# Text in a chat template that only one format has; the first that is found decides.
_SIGNS = (("[AVAILABLE_TOOLS]", "mistral"), ("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3_json"))
_LLAMA_SIGN = "Environment: ipython"  # Llama 3 templates name no marker of their own
_MODEL_TYPES = {"qwen2": "hermes", "qwen3": "hermes", "mistral": "mistral"}


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """Frozen at start. calls: None where the format is not known. may_choose: the model may decide to call (tool_choice "auto").

    template_has_tools: the chat template itself describes tools to the model.
    """

    calls: type[CallReader] | None
    reasoning: ReasoningFormat | None
    may_choose: bool
    template_has_tools: bool


def check_names(parser: str, reasoning_parser: str | None) -> None:
    """Refuse parsers that do not exist.

    Raises:
        ConfigError: the message lists those that do.
    """
    if parser != AUTO and parser not in CALL_READERS:
        raise ConfigError(f"tool_call_parser is {parser!r}, but it must be one of {', '.join([AUTO, *CALL_READERS])}")
    if reasoning_parser is not None and reasoning_parser not in FORMATS:
        raise ConfigError(
            f"reasoning_parser is {reasoning_parser!r}, but it must be one of {', '.join(FORMATS)}",
            hint="leave it out for models that do not reason aloud",
        )


def formats_for(*, parser: str, reasoning_parser: str | None, may_choose: bool, template: str, model_type: str) -> AnswerFormats:
    """Return the formats.

    Args:
        parser: a name of CALL_READERS, or "auto" to look at the template and the model's type.
        template: the chat template, "" where the model has none.

    Raises:
        ConfigError: no parser of that name.
    """
    check_names(parser, reasoning_parser)
    has_tools = "tools" in template
    name = parser if parser != AUTO else detected(template, model_type)
    return AnswerFormats(
        calls=CALL_READERS[name] if name else None,
        reasoning=FORMATS[reasoning_parser] if reasoning_parser else None,
        may_choose=may_choose,
        template_has_tools=has_tools,
    )


def detected(template: str, model_type: str) -> str | None:
    """Return the format that a template gives away, None where it has one of its own that is not known.

    A template without tools gets our description of them, and that asks for the format of Hermes.
    """
    if "tools" not in template:
        return "hermes"
    for sign, name in _SIGNS:
        if sign in template:
            return name
    if _LLAMA_SIGN in template:
        return "llama3_json"
    return _MODEL_TYPES.get(model_type)
