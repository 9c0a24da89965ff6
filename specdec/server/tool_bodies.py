"""Tools in request bodies: their shapes, and what a body asks of them as a ToolUse.

Owns: names and shapes of tool fields. Must not know: formats of models (answers/), routes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from specdec.errors import RequestRejected
from specdec.server.answers.tools import NO_TOOLS, ToolSpec, ToolUse
from specdec.server.fields import Body

NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
CHOICES = "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"


class FunctionTool(Body):
    """A function that the model may call. strict needs no saying where the call is forced: its grammar holds the schema."""

    part_of: ClassVar[str] = "tools.function."

    name: str = Field(pattern=NAME)
    """Up to 64 letters, digits, `_`, `.` and `-`."""
    description: str | None = None
    """What it is for; the model reads it."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """Passes: a forced call always keeps the schema, others are the model's own words."""


class TypedTool(Body):
    """Anything in `tools`: refused by its type before its members are looked at, which differ from type to type."""

    part_of: ClassVar[str] = "tools."

    type: Literal["function"]
    """Always `function`."""

    @model_validator(mode="before")
    @classmethod
    def name_the_type(cls, value: Any) -> Any:
        """Only functions are served."""
        if isinstance(value, dict) and value.get("type") != "function":
            raise RequestRejected(f"tools.type is {repr(value.get('type'))[:40]}, but only 'function' is served", param="tools")
        return value


class Tool(TypedTool):
    """One function."""

    function: FunctionTool
    """What may be called."""


class NamedFunction(Body):
    """The function that must be called."""

    part_of: ClassVar[str] = "tool_choice.function."

    name: str
    """One of `tools`."""


class NamedTool(Body):
    """tool_choice as an object."""

    part_of: ClassVar[str] = "tool_choice."

    type: Literal["function"]
    """Always `function`."""
    function: NamedFunction
    """Which one."""


class CalledFunction(Body):
    """The function of a call in an assistant's message; arguments are JSON text, as they were sent."""

    part_of: ClassVar[str] = "messages.tool_calls.function."

    name: str
    """What was called."""
    arguments: str = "{}"
    """JSON text of an object, as the server gave it."""

    @model_validator(mode="after")
    def need_an_object(self) -> CalledFunction:
        """Templates print arguments member by member."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            shown = self.arguments if len(self.arguments) <= 60 else self.arguments[:57] + "..."
            rule = f"arguments of the call of {self.name!r} are {shown!r}, but they must be the JSON text of an object"
            raise RequestRejected(rule, param="messages", hint="send them as the server gave them")
        return self


class MessageCall(Body):
    """One call in an assistant's message."""

    part_of: ClassVar[str] = "messages.tool_calls."
    no_ops: ClassVar[frozenset[str]] = frozenset({"index"})

    id: str | None = None
    """Id that the message with the result names."""
    type: Literal["function"] = "function"
    """Always `function`."""
    function: CalledFunction
    """The call."""

    def for_template(self) -> dict[str, Any]:
        """Return it with arguments as an object, which is what chat templates print."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments or "{}")}
        return {"type": "function", "function": function} | ({} if self.id is None else {"id": self.id})


class ToolFields(Body):
    """The tool fields of /v1/chat/completions."""

    tools: list[Tool] | None = None
    """What the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """`none`, `auto`, `required`, or the function that must be called; null is `auto`."""
    parallel_tool_calls: bool | None = None
    """False: one call at most; null is true."""

    @field_validator("tool_choice", mode="before")
    @classmethod
    def name_the_choices(cls, value: Any) -> Any:
        """One sentence instead of pydantic's report on every arm of the union."""
        if value is None or value in ("none", "auto", "required") or (isinstance(value, dict) and value.get("type") == "function"):
            return value
        raise ValueError(f"tool_choice is {repr(value)[:60]}, but it must be {CHOICES}")

    @property
    def tool_use(self) -> ToolUse:
        """What the body asks for. Without tool_choice the model decides, as at OpenAI.

        Raises:
            RequestRejected: a name is there twice, or the one that must be called is not there.
        """
        choice = self.tool_choice
        tools = tuple(ToolSpec(tool.function.name, tool.function.description, tool.function.parameters) for tool in self.tools or ())
        if not tools:
            if choice not in (None, "none", "auto"):
                raise RequestRejected(
                    "tool_choice asks for a call, but tools is empty", param="tool_choice", hint="send tools, or leave it out"
                )
            return NO_TOOLS
        is_named = isinstance(choice, NamedTool)
        use = tool_use(tools, choice.function.name if isinstance(choice, NamedTool) else choice, named=is_named)
        return replace(use, is_parallel=self.parallel_tool_calls is not False)


def tool_use(tools: Sequence[ToolSpec], choice: str | None, *, named: bool) -> ToolUse:
    """Return the use of tools that `choice` asks for: none, auto (or null), required, or with `named` the name of one.

    Raises:
        RequestRejected: see `ToolFields.tool_use`.
    """
    names = tuple(tool.name for tool in tools)
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise RequestRejected(f"tools has the name {twice!r} twice, but names must differ", param="tools")
    if named:
        if choice not in names:
            rule = f"tool_choice names {str(choice)[:64]!r}, but tools has {', '.join(names)[:200]}"
            raise RequestRejected(rule, param="tool_choice")
        return ToolUse(tuple(tools), "forced", allowed=(str(choice),), is_named=True)
    if choice == "required":
        return ToolUse(tuple(tools), "forced", allowed=names)
    return ToolUse(tuple(tools), "none" if choice == "none" else "auto")
