"""plan_for: from a chat body to how its answers are read, and what cannot be had together.

Owns: the rules of tools, reasoning and constraints beside one another. Must not know: engines. Read next: reader.py.
"""

from __future__ import annotations

from specdec.errors import RequestRejected
from specdec.server.answers.calls import CallReader, Forced
from specdec.server.answers.formats import AnswerFormats
from specdec.server.answers.reader import AnswerPlan
from specdec.server.answers.reasoning import begins_inside
from specdec.server.answers.tools import ToolUse


def plan_for(use: ToolUse, prompt: str, *, formats: AnswerFormats, constraint: str | None, shows_reasoning: bool) -> AnswerPlan:
    """Return the plan of a request.

    Args:
        prompt: the rendered conversation, whose end may have opened the reasoning.
        constraint: the field that constrains the text, None without any. It holds from the first token on, so that
            there is no reasoning before it.

    Raises:
        RequestRejected: the model may decide to call, but this server cannot read its calls, or a constraint forbids them.
    """
    reads_reasoning = formats.reasoning is not None and constraint is None
    if formats.reasoning is None and not shows_reasoning:
        raise RequestRejected(
            "include_reasoning is false, but this server does not tell reasoning from content",
            param="include_reasoning",
            hint="start it with --reasoning-parser, or leave the field out",
        )
    return AnswerPlan(
        calls=Forced if use.mode == "forced" else _free_calls(formats, constraint) if use.mode == "auto" else None,
        tool_names=tuple(tool.name for tool in use.tools),
        is_parallel=use.is_parallel,
        is_named=use.is_named,
        reads_reasoning=reads_reasoning,
        begins_inside=reads_reasoning and formats.reasoning is not None and begins_inside(formats.reasoning, prompt),
        shows_reasoning=shows_reasoning,
    )


def _free_calls(formats: AnswerFormats, constraint: str | None) -> type[CallReader]:
    if constraint is not None:
        raise RequestRejected(
            f"{constraint} holds the whole answer, so that the model could not call a tool, but tool_choice is 'auto'",
            param="tool_choice",
            hint="send tool_choice 'none' for the constrained answer, 'required' for a call, or drop the constraint",
        )
    if not formats.may_choose:
        raise RequestRejected(
            "tool_choice is 'auto', but this server runs with --no-enable-auto-tool-choice",
            param="tool_choice",
            hint="send 'required', 'none' or the name of a function",
        )
    if formats.calls is None:
        raise RequestRejected(
            "tool_choice is 'auto', but the format of this model's calls is not known",
            param="tool_choice",
            hint="start the server with --tool-call-parser, or send 'required', 'none' or the name of a function",
        )
    return formats.calls
