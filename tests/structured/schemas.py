"""Thirty schemas as clients send them: flat and nested, enums, formats, unions, references, arrays, maps.

Lengths are bounded so that a random model comes to an end.
"""

from __future__ import annotations

from typing import Any

NAME = {"type": "string", "maxLength": 4}
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


POINT = _object(x=COUNT, y=COUNT)
SCHEMAS: tuple[dict[str, Any], ...] = (
    _object(id=COUNT),
    _object(id=COUNT, name=NAME),
    {"type": "object", "properties": {"id": COUNT, "name": NAME}, "required": ["name"]},
    _object(name={"enum": ["ab", "id", "null"]}),
    _object(kind={"const": "a"}, ok={"type": "boolean"}),
    _object(at=POINT, to=POINT),
    _object(a=_object(b=_object(c=_object(d={"type": "null"})))),
    _object(list={"type": "array", "items": COUNT, "minItems": 1, "maxItems": 3}),
    _object(list={"type": "array", "items": POINT, "maxItems": 2}),
    {"type": "array", "items": {"enum": ["ab", 12, None, True]}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [COUNT, NAME, {"type": "boolean"}], "items": False, "minItems": 3},
    _object(day={"type": "string", "format": "date"}),
    _object(when={"type": "string", "format": "date-time"}),
    _object(at={"type": "string", "format": "time"}),
    _object(ip={"type": "string", "format": "ipv4"}),
    _object(key={"type": "string", "format": "uuid"}),
    _object(code={"type": "string", "pattern": "^[A-C]{2}-[0-9]{3}$"}),
    _object(value={"anyOf": [COUNT, NAME, {"type": "null"}]}),
    _object(value={"type": ["boolean", "null"]}),
    {"anyOf": [_object(id=COUNT), _object(name=NAME)]},
    {"oneOf": [_object(kind={"const": "a"}, id=COUNT), _object(kind={"const": "b"}, name=NAME)]},
    {"$defs": {"p": POINT}, "type": "object", "properties": {"p": {"$ref": "#/$defs/p"}}, "required": ["p"]},
    {"definitions": {"n": {"enum": ["x", "y"]}}, "type": "array", "items": {"$ref": "#/definitions/n"}, "minItems": 1, "maxItems": 3},
    {
        "$defs": {"node": _object(v=COUNT, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}), "leaf": _object(v=COUNT)},
        "$ref": "#/$defs/node",
    },
    {"type": "object", "additionalProperties": COUNT, "propertyNames": {"enum": ["ab", "id"]}, "minProperties": 1, "maxProperties": 2},
    {"type": "integer", "minimum": -120, "exclusiveMaximum": 7},
    {"type": "integer", "minimum": 10, "maximum": 1200},
    {"enum": ["ab", 20, {"id": 12}, [True, None]]},
    {"type": "object", "required": ["ok"], "additionalProperties": {"type": "boolean"}, "maxProperties": 1},
    {"allOf": [_object(name={"type": "string", "minLength": 2, "maxLength": 3})], "description": "as written by a library"},
)
assert len(SCHEMAS) == 30
