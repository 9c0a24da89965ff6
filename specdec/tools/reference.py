"""The generated pages of docs/reference: keys of --speculative-config, and the HTTP API. `python -m specdec.tools.reference` writes them.

Owns: how the pages are laid out. Must not know: what any key means; models and the server's own OpenAPI document say that.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

_NOTE = "<!-- written by `python -m specdec.tools.reference`; a test compares it with the code -->"
_LIMITS = {"minimum": "≥", "maximum": "≤", "exclusiveMinimum": ">", "exclusiveMaximum": "<"}
_METHODS = ("get", "post", "put", "delete")


def config_page(models: Mapping[str, type[BaseModel]], common: type[BaseModel]) -> str:
    """Return config.md. models: by method; common: what all of them have."""
    lines = ["# Keys of `--speculative-config`", "", _NOTE, ""]
    lines += ["As JSON, or one by one as `--speculative-config.KEY VALUE`. An unknown key, or one of another method, is refused.", ""]
    shared = common.model_json_schema()["properties"]
    lines += ["## All methods", "", _prose(common), "", *_key_table({"properties": _without_method(shared)})]
    for method, model in models.items():
        schema = model.model_json_schema()
        own = {name: value for name, value in _without_method(schema["properties"]).items() if value != shared.get(name)}
        lines += ["", f"## `{method}`", "", _prose(model), ""]
        lines += _key_table(schema | {"properties": own}) if own else ["No keys of its own."]
    return "\n".join(lines).rstrip() + "\n"


def http_page(document: Mapping[str, Any]) -> str:
    """Return http-api.md from an OpenAPI document."""
    lines = ["# HTTP API", "", _NOTE, ""]
    lines += [
        'Errors have OpenAI\'s body: `{"error": {"message", "type", "param", "code"}}`. `GET /openapi.json` is this page for machines.',
        "",
    ]
    lines += ["| route | |", "|---|---|"]
    routes = list(_routes(document))
    lines += [f"| `{verb} {path}` | {_first_sentence(route)} |" for verb, path, route in routes]
    bodies: dict[str, str] = {}
    for verb, path, route in routes:
        name = _body_name(route)
        if name is not None:
            bodies.setdefault(name, f"{verb} {path}")
    schemas = document.get("components", {}).get("schemas", {})
    for name, used_by in bodies.items():
        lines += ["", f"## Body of `{used_by}`", "", *_schema_lines(name, schemas)]
    nested = sorted(_nested(bodies, schemas) - set(bodies))
    for name in nested:
        lines += ["", f"### {name.rsplit('__', 1)[-1]}", "", *_schema_lines(name, schemas)]
    return "\n".join(lines).rstrip() + "\n"


def _routes(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for path, verbs in document["paths"].items():
        for verb in _METHODS:
            if verb in verbs:
                yield verb.upper(), path, verbs[verb]


def _first_sentence(route: Mapping[str, Any]) -> str:
    text = str(route.get("description") or route.get("summary") or "")
    return _cell(text.split("\n\n")[0])


def _body_name(route: Mapping[str, Any]) -> str | None:
    schema = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    return _reference(schema)


def _reference(schema: Mapping[str, Any]) -> str | None:
    return str(schema["$ref"]).rsplit("/", 1)[-1] if "$ref" in schema else None


def _schema_lines(name: str, schemas: Mapping[str, Any]) -> list[str]:
    schema = schemas[name]
    lines = [_cell(str(schema.get("description", ""))), ""] if schema.get("description") else []
    if "properties" not in schema:
        return [*lines, f"`{_type_of(schema)}`"]
    return [*lines, *_key_table(schema)]


def _key_table(schema: Mapping[str, Any]) -> list[str]:
    required = set(schema.get("required", ()))
    lines = ["| key | type | default | |", "|---|---|---|---|"]
    for key, value in schema["properties"].items():
        default = "required" if key in required else f"`{json.dumps(value.get('default'))}`"
        lines.append(f"| `{key}` | {_type_of(value)} | {default} | {_cell(str(value.get('description', '')))} |")
    return lines


def _type_of(schema: Mapping[str, Any]) -> str:
    name = _reference(schema)
    if name is not None:
        name = name.rsplit("__", 1)[-1]
        return f"[{name}](#{name.lower()})" if not name.endswith("Config") else f"keys of {name}"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_type_of(part) for part in schema[key]))
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    if "prefixItems" in schema:
        return f"[{', '.join(_type_of(part) for part in schema['prefixItems'])}]"
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {}))}"
    limits = [f"{sign} {schema[key]}" for key, sign in _LIMITS.items() if key in schema]
    return " ".join([str(schema.get("type", "anything")), *limits])


def _nested(names: Mapping[str, Any], schemas: Mapping[str, Any]) -> set[str]:
    """All schemas that those of `names` mention, directly or not."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        text = json.dumps(schemas[waiting.pop()])
        fresh = {match for match in re.findall(r'"#/components/schemas/(\w+)"', text) if match not in found}
        found |= fresh
        waiting += fresh
    return found


def _without_method(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in properties.items() if name != "method"}


def _prose(model: type[BaseModel]) -> str:
    return inspect.cleandoc(model.__doc__ or "").split("\n\nRaises:")[0]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _write(pages: Path) -> None:
    from specdec.config.fields import SpeculativeBase
    from specdec.config.speculative import MODELS

    (pages / "config.md").write_text(config_page(MODELS, SpeculativeBase), encoding="utf-8")
    (pages / "http-api.md").write_text(http_page(server_document()), encoding="utf-8")


def server_document() -> Mapping[str, Any]:
    """The server's own OpenAPI document, without a server: routes are only listed, so nothing behind them is needed."""
    from unittest.mock import MagicMock

    from specdec.server.app import create_app
    from specdec.server.options import ServerOptions

    app = create_app(MagicMock(), MagicMock(), MagicMock(), options=ServerOptions())
    document: Mapping[str, Any] = app.openapi()
    return document


if __name__ == "__main__":
    _write(Path(__file__).resolve().parents[2] / "docs" / "reference")
