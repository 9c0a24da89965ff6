"""Tools of a request: what the template is shown, and the grammar that makes a model call one.

Owns: the schema of forced calls, and the description of tools for templates that have none.
Must not know: HTTP bodies (protocol.py reads them), engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the client offers. parameters: its JSON schema, None where it takes none."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return it as chat templates read it."""
        function: dict[str, Any] = {"name": self.name, "description": self.description or ""}
        function["parameters"] = dict(self.parameters) if self.parameters is not None else {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools and what the client wants of them: "auto" lets the model decide, "forced" makes it call one of `allowed`."""

    tools: tuple[ToolSpec, ...]
    mode: Literal["none", "auto", "forced"]
    allowed: tuple[str, ...] = ()
    is_named: bool = False
    is_parallel: bool = True

    def for_template(self) -> list[dict[str, Any]]:
        """Return what the model is told of: nothing where it must not call."""
        return [tool.for_template() for tool in self.tools] if self.mode != "none" else []


NO_TOOLS = ToolUse((), "none")


def forced_schema(use: ToolUse) -> str:
    """Return the JSON schema of a list of calls of the allowed tools."""
    tools = [tool for tool in use.tools if tool.name in use.allowed]
    calls = [_call_schema(tool, index) for index, tool in enumerate(tools)]
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, Any] = {"type": "array", "items": items, "minItems": 1}
    if use.is_named or not use.is_parallel:
        schema["maxItems"] = 1
    definitions = {f"tool{index}": _moved(tool.parameters, f"tool{index}") for index, tool in enumerate(tools) if tool.parameters}
    return json.dumps(schema | ({"$defs": definitions} if definitions else {}))


def _call_schema(tool: ToolSpec, index: int) -> dict[str, Any]:
    nothing: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    arguments = {"$ref": f"#/$defs/tool{index}"} if tool.parameters else nothing
    properties = {"name": {"const": tool.name}, "arguments": arguments}
    return {"type": "object", "properties": properties, "required": ["name", "arguments"], "additionalProperties": False}


def _moved(node: Any, key: str) -> Any:
    """The schema with its own references pointing to where it now stands."""
    if isinstance(node, list):
        return [_moved(child, key) for child in node]
    if not isinstance(node, Mapping):
        return node
    moved = {name: _moved(child, key) for name, child in node.items()}
    reference = node.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = f"#/$defs/{key}" + reference[1:]
    return moved


def told_in_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation for a template that knows no tools: described in the system message, calls and results as text."""
    told = [_as_text(message) for message in messages]
    if not tools:
        return told
    text = _description(tools)
    if told and told[0]["role"] == "system":
        first = told[0] | {"content": f"{told[0]['content']}\n\n{text}" if told[0]["content"] else text}
        return [first, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _description(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    return "\n".join(
        [
            "You can call these functions, one JSON object a line with name, description and parameters (a JSON schema):",
            *lines,
            "To call one, answer with a JSON object inside tags, once for each call:",
            '<tool_call>{"name": "function", "arguments": {"parameter": "value"}}</tool_call>',
        ]
    )


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    content = str(message.get("content") or "")
    if message["role"] in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>{content}</tool_response>"}
    calls = [f"<tool_call>{json.dumps(call['function'], ensure_ascii=False)}</tool_call>" for call in message.get("tool_calls") or ()]
    return {"role": message["role"], "content": "\n".join([*([content] if content else []), *calls])}
