"""checked_schema: a JSON schema as the compiler will honour it whole, or a refusal that names the place and the keyword.

Owns: which keywords hold and which combinations do not; the compiler itself reads past those with a warning at best.
Must not know: tokens. What is returned accepts nothing that the schema refuses; where no type is given, it is the one that
the keywords speak of. Properties that are not named stay out unless additionalProperties lets them in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from specdec.structured.faults import GrammarFault
from specdec.structured.regex import check_json_pattern

MAX_DEPTH = 64  # levels of nested schemas: the compiler's time grows steeply with them

_STRING = frozenset({"minLength", "maxLength", "pattern", "format"})
_NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_OBJECT = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties"}
)
_ARRAY = frozenset({"items", "prefixItems", "minItems", "maxItems"})
_KEYWORDS_OF = {"string": _STRING, "number": _NUMBER, "object": _OBJECT, "array": _ARRAY}
_ALONE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")  # the compiler reads one of these and no keyword beside it
_VALIDATING = frozenset({"type", *_ALONE}).union(*_KEYWORDS_OF.values())
_UNKNOWN = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedProperties", "unevaluatedItems", "additionalItems", "$dynamicRef", "$recursiveRef"),
)
_TYPES_OF = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"}

# The compiler's own rules let 064.1.1.1 and February 31st pass. These have no year before 1000 and no leap day.
_BYTE = "(25[0-5]|(2[0-4]|1[0-9]|[1-9])?[0-9])"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"[1-9][0-9]{{3}}-{_DAY}"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {"ipv4": rf"({_BYTE}\.){{3}}{_BYTE}", "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}

Schema = dict[str, Any]


def checked_schema(text: str) -> str:
    """Return the schema as JSON text for the compiler.

    Raises:
        GrammarFault: it is no JSON, no schema, or says something that could not be kept.
    """
    try:
        root = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarFault(f"the schema is no JSON text: {error}") from None
    check = _Check(root)
    schema = check.schema(root, "#", 0)
    check.refuse_unread_refs()
    return json.dumps(schema)


class _Check:
    """Walks one schema. Paths are JSON pointers, for the messages."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._places: set[str] = set()  # of all schemas that were checked
        self._refs: dict[str, str] = {}  # $ref -> where it stands

    def refuse_unread_refs(self) -> None:
        """Refuse references to places that hold no schema: nobody checked what stands there."""
        for ref, path in self._refs.items():
            if ref not in self._places:
                raise GrammarFault(f"{path}/$ref is {json.dumps(ref)[:60]}, but no schema stands there", hint="put it into $defs")

    def schema(self, node: Any, path: str, depth: int) -> Any:
        """Return `node` with types and properties spelled out."""
        if depth > MAX_DEPTH:
            raise GrammarFault(f"{path[:80]}...: schemas are nested deeper than {MAX_DEPTH} levels", hint="use $ref and $defs")
        if isinstance(node, bool):
            self._places.add(path)
            return node
        if not isinstance(node, dict):
            raise GrammarFault(f"{path}: a schema is an object or a boolean, not {json.dumps(node)[:40]}")
        self._places.add(path)
        self._refuse_unknown(node, path)
        node = self._with_children(node, path, depth)
        alone = [key for key in _ALONE if key in node]
        return self._alone(node, alone[0], path) if alone else self._typed(node, path)

    def _refuse_unknown(self, node: Schema, path: str) -> None:
        for key in _UNKNOWN:
            if key in node:
                raise GrammarFault(f"{path}: the keyword {key} cannot be enforced", hint="remove it and check the answer yourself")
        if node.get("uniqueItems"):
            raise GrammarFault(f"{path}: uniqueItems cannot be enforced", hint="remove it and check the answer yourself")

    def _with_children(self, node: Schema, path: str, depth: int) -> Schema:
        """The node with every schema below it checked."""
        result = dict(node)
        for key in ("properties", "patternProperties", "$defs", "definitions"):
            if key in node:
                if not isinstance(node[key], dict):
                    raise GrammarFault(f"{path}/{key} must be an object")
                result[key] = {name: self.schema(child, _below(path, key, name), depth + 1) for name, child in node[key].items()}
        for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if key in node:
                if not isinstance(node[key], list) or not node[key]:
                    raise GrammarFault(f"{path}/{key} must be a list that is not empty")
                result[key] = [self.schema(child, f"{path}/{key}/{i}", depth + 1) for i, child in enumerate(node[key])]
        for key in ("items", "additionalProperties", "propertyNames"):
            if key in node:
                result[key] = self.schema(node[key], f"{path}/{key}", depth + 1)
        for pattern in [node["pattern"]] if "pattern" in node else []:
            self._regex(pattern, f"{path}/pattern")
        for pattern in node.get("patternProperties", ()):
            self._regex(pattern, f"{path}/patternProperties")
        return result

    def _regex(self, pattern: Any, path: str) -> None:
        if not isinstance(pattern, str):
            raise GrammarFault(f"{path} must be a string")
        try:
            check_json_pattern(pattern)
        except GrammarFault as fault:
            raise GrammarFault(f"{path}: {fault.reason}", hint=fault.hint) from None

    # -- keywords that stand alone -----------------------------------------------------------------------------------

    def _alone(self, node: Schema, key: str, path: str) -> Schema:
        beside = sorted((node.keys() & _VALIDATING) - {key})
        if key in ("enum", "const") and beside == ["type"]:
            return self._enum(node, key, path)
        if beside:
            raise GrammarFault(f"{path}: {key} is enforced alone, but {beside[0]} stands beside it", hint=f"move {beside[0]} into {key}")
        if key == "$ref":
            self._resolve(node[key], path)
            self._refs.setdefault(node[key], path)
        if key == "allOf" and len(node[key]) > 1:
            raise GrammarFault(f"{path}: allOf is enforced with one schema only", hint="write the schemas as one")
        if key == "oneOf":
            self._one_of(node[key], path)
        return node

    def _enum(self, node: Schema, key: str, path: str) -> Schema:
        """Values of another type than `type` can never be drawn."""
        types = _type_list(node["type"])
        values = [node["const"]] if key == "const" else node["enum"]
        if not isinstance(values, list):
            raise GrammarFault(f"{path}/enum must be a list")
        kept = [value for value in values if _has_type(value, types)]
        if not kept:
            raise GrammarFault(f"{path}: no value of {key} has the type {json.dumps(node['type'])}")
        return {name: value for name, value in node.items() if name not in ("type", key)} | {"enum": kept}

    def _resolve(self, ref: Any, path: str) -> Any:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise GrammarFault(f"{path}/$ref is {json.dumps(ref)[:60]}, but only places of the same schema are read: # and #/...")
        found = self.root
        for part in ref.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                raise GrammarFault(f"{path}/$ref is {json.dumps(ref)[:60]}, but {name!r} is not there")
        return found

    def _one_of(self, branches: list[Any], path: str) -> None:
        """The compiler takes oneOf for anyOf, which is the same where no value fits two branches."""
        plain = [self._follow(branch, path) for branch in branches]
        for i, left in enumerate(plain):
            for j, right in enumerate(plain[:i]):
                if not _are_disjoint(left, right):
                    raise GrammarFault(
                        f"{path}/oneOf: branches {j} and {i} may accept the same value, and then none of them counts",
                        hint="use anyOf, or give each branch its own type or its own value of a required property",
                    )

    def _follow(self, branch: Any, path: str) -> Any:
        for _ in range(MAX_DEPTH):
            if not isinstance(branch, dict) or "$ref" not in branch:
                break
            branch = self._resolve(branch["$ref"], path)
        return branch

    # -- keywords of one type ----------------------------------------------------------------------------------------

    def _typed(self, node: Schema, path: str) -> Schema:
        if "type" not in node:
            types = [name for name, keywords in _KEYWORDS_OF.items() if node.keys() & keywords]
            if not types:
                return node
            if len(types) > 1:
                raise GrammarFault(f"{path}: the keywords speak of {' and '.join(types)}, so the schema needs a type")
            node = node | {"type": types[0]}
        types = _type_list(node["type"])
        if "object" in types:
            node = self._object(node, path)
        if "array" in types:
            node = _array(node, path)
        if "string" in types and len(clash := sorted(node.keys() & _STRING)) > 1 and clash != ["maxLength", "minLength"]:
            raise GrammarFault(f"{path}: {' and '.join(clash)} cannot be enforced together", hint="keep one, or write one pattern for both")
        pattern = _FORMATS.get(node["format"]) if "string" in types and isinstance(node.get("format"), str) else None
        if pattern is not None:
            node = {key: value for key, value in node.items() if key != "format"} | {"pattern": f"^{pattern}$"}
        if node.keys() & _NUMBER and {"number", "integer"} & set(types):
            _check_number(node, types, path)
        return node

    def _object(self, node: Schema, path: str) -> Schema:
        properties, required = node.get("properties", {}), node.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise GrammarFault(f"{path}/required must be a list of names")
        for key in ("patternProperties", "propertyNames"):
            if key in node and (properties or required):
                raise GrammarFault(f"{path}: {key} is not enforced beside properties and required", hint="name all properties")
        missing = [name for name in required if name not in properties]
        if not missing:
            return node
        others = node.get("additionalProperties", True)
        if others is False:
            raise GrammarFault(f"{path}: {missing[0]!r} is required, but neither in properties nor allowed by additionalProperties")
        return node | {"properties": properties | dict.fromkeys(missing, others)}


def _array(node: Schema, path: str) -> Schema:
    """An array that says nothing of its items may hold any; the compiler would let none of them in."""
    for key in ("minItems", "maxItems"):
        value = node.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise GrammarFault(f"{path}/{key} is {json.dumps(value)[:40]}, but it must be a whole number, 0 or more")
    least, most, places = node.get("minItems", 0), node.get("maxItems"), len(node.get("prefixItems", ()))
    if most is not None and least > most:
        raise GrammarFault(f"{path}: minItems is {least}, but maxItems is {most}, so that no array fits", hint="lower minItems")
    if least > places and node.get("items") is False:
        named = f"prefixItems has {places} and items is false"
        raise GrammarFault(f"{path}: minItems is {least}, but {named}, so that no array is that long", hint="say in items what may follow")
    if "items" not in node and (least > places or not places):
        return node | {"items": True}
    return node


def _below(path: str, key: str, name: str) -> str:
    return f"{path}/{key}/" + name.replace("~", "~0").replace("/", "~1")


def _check_number(node: Schema, types: list[str], path: str) -> None:
    for key in node.keys() & _NUMBER:
        if isinstance(node[key], bool) or not isinstance(node[key], int | float):
            raise GrammarFault(f"{path}/{key} must be a number")
    if "multipleOf" not in node:
        return
    if "number" in types or node["multipleOf"] != int(node["multipleOf"]):
        raise GrammarFault(f"{path}: multipleOf is enforced for whole numbers of type integer only", hint="remove it")
    if len(node.keys() & _NUMBER) > 1:
        raise GrammarFault(f"{path}: multipleOf is not enforced beside a range", hint="keep one of them, or list the values in enum")


def _type_list(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


def _has_type(value: Any, types: Iterable[str]) -> bool:
    name = _TYPES_OF[type(value)]
    return name in types or (name == "integer" and "number" in types)


def _are_disjoint(left: Any, right: Any, *, depth: int = 0) -> bool:
    """True when it is plain that no value satisfies both: other types, other constants, or a required property that tells."""
    if not isinstance(left, dict) or not isinstance(right, dict):
        return False
    mine, others = _types(left), _types(right)
    if mine and others and not mine & others:
        return True
    values = (_constants(left), _constants(right))
    if values[0] is not None and values[1] is not None:
        return not values[0] & values[1]
    if mine != {"object"} or others != {"object"} or depth:
        return False
    shared = set(left.get("required", ())) & set(right.get("required", ()))
    properties: tuple[Mapping[str, Any], ...] = (left.get("properties", {}), right.get("properties", {}))
    return any(_are_disjoint(properties[0].get(name), properties[1].get(name), depth=1) for name in shared)


def _types(node: Schema) -> set[str]:
    """The types of a node's values, number standing for integer too; empty where it is not plain."""
    if "const" in node or "enum" in node:
        values = [node["const"]] if "const" in node else node["enum"]
        names = {_TYPES_OF[type(value)] for value in values}
    elif "type" in node:
        names = set(_type_list(node["type"]))
    else:
        names = {name for name, keywords in _KEYWORDS_OF.items() if node.keys() & keywords}
    return {"number" if name == "integer" else name for name in names}


def _constants(node: Schema) -> set[str] | None:
    values = [node["const"]] if "const" in node else node.get("enum")
    return None if values is None else {json.dumps(value, sort_keys=True) for value in values}
