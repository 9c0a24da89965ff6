"""What a schema says is kept whole, or it is refused by keyword and place."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from specdec.engine.tokenizer import Tokenizer
from specdec.structured.compiler import Grammar
from specdec.structured.faults import GrammarFault
from specdec.structured.mask import num_valid
from specdec.structured.matcher import Matcher
from specdec.structured.regex import check_json_pattern, check_regex
from specdec.structured.schema import MAX_DEPTH, checked_schema

INTEGER = {"type": "integer"}
REFUSED: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, "#: the keyword not"),
    ({"properties": {"a": {"contains": INTEGER}}}, "#/properties/a: the keyword contains"),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems"),
    ({"if": {}, "then": {}}, "keyword if"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "string", "format": "date", "maxLength": 3}, "format and maxLength cannot be enforced together"),
    ({"type": "string", "pattern": "a+", "minLength": 3}, "minLength and pattern"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf is enforced for whole numbers"),
    ({"type": "integer", "multipleOf": 0.5}, "multipleOf is enforced for whole numbers"),
    ({"type": "integer", "multipleOf": 3, "minimum": 9}, "multipleOf is not enforced beside a range"),
    ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, "exclusiveMinimum must be a number"),
    ({"oneOf": [{"type": "number"}, INTEGER]}, "branches 0 and 1 may accept the same value"),
    ({"oneOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]}, "may accept the same value"),
    ({"allOf": [INTEGER, {"minimum": 3}]}, "allOf is enforced with one schema only"),
    ({"type": "object", "anyOf": [{"required": ["a"]}]}, "anyOf is enforced alone, but type stands beside it"),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": INTEGER}}, r"\$ref is enforced alone, but minimum"),
    ({"$ref": "http://x.y/z"}, "only places of the same schema"),
    ({"$ref": "#/$defs/b", "$defs": {"a": INTEGER}}, "'b' is not there"),
    ({"$ref": "#/x-mine/a", "x-mine": {"a": {"not": {}}}}, "no schema stands there"),
    ({"type": "string", "enum": [1, 2]}, "no value of enum has the type"),
    ({"minLength": 3, "minimum": 3}, "string and number, so the schema needs a type"),
    ({"type": "object", "required": ["z"], "additionalProperties": False}, "'z' is required, but neither in properties"),
    ({"type": "object", "properties": {"ab": {}}, "patternProperties": {"^a": INTEGER}}, "patternProperties is not enforced beside"),
    ({"type": "object", "properties": {"q": INTEGER}, "propertyNames": {"maxLength": 0}}, "propertyNames is not enforced beside"),
    ({"type": "array", "items": [INTEGER]}, r"#/items: a schema is an object or a boolean, not \["),
    ({"type": "array", "items": INTEGER, "minItems": -1}, "#/minItems is -1, but it must be a whole number"),
    ({"type": "array", "maxItems": "2"}, "#/maxItems is .*, but it must be a whole number"),
    ({"type": "array", "items": INTEGER, "minItems": 3, "maxItems": 2}, "#: minItems is 3, but maxItems is 2"),
    ({"type": "array", "prefixItems": [INTEGER], "items": False, "minItems": 2}, "minItems is 2, but prefixItems has 1 and items is false"),
    ({"type": "string", "pattern": "a^b"}, r"#/pattern: the regex has \^ at character 1"),
    ({"anyOf": []}, "must be a list that is not empty"),
    ([], "a schema is an object or a boolean"),
]


@pytest.mark.parametrize(("schema", "text"), REFUSED, ids=lambda value: json.dumps(value)[:50] if not isinstance(value, str) else "")
def test_what_could_not_be_kept_is_refused(schema: Any, text: str) -> None:
    with pytest.raises(GrammarFault, match=text):
        checked_schema(json.dumps(schema))


@pytest.mark.parametrize("text", ["", "{", '{"type": "string"', "[" * 100_000])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(GrammarFault, match="no JSON text"):
        checked_schema(text)


def test_deep_nesting_is_refused_before_the_compiler_sees_it() -> None:
    assert checked_schema('{"items":' * MAX_DEPTH + "{}" + "}" * MAX_DEPTH)
    with pytest.raises(GrammarFault, match="nested deeper than 64"):
        checked_schema('{"items":' * (MAX_DEPTH + 1) + "{}" + "}" * (MAX_DEPTH + 1))


# schema, documents it must let through, documents it must not
KEPT: list[tuple[Any, list[Any], list[Any]]] = [
    ({"minLength": 3}, ["abc"], ["a"]),
    ({"minimum": 3}, [4], [1]),
    ({"required": ["z"]}, [{"z": 1}], [{}, 3]),
    ({"type": "object", "required": ["z"], "additionalProperties": INTEGER}, [{"z": 1}], [{"z": "a"}, {}]),
    ({"type": "string", "enum": ["a", 1]}, ["a"], [1]),
    ({"type": ["integer", "null"], "enum": ["a", 1, None, True]}, [1, None], ["a", True]),
    ({"type": "number", "const": 3}, [3], [4]),
    ({"oneOf": [{"type": "string"}, INTEGER]}, ["a", 1], [[]]),
    (
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {
                "a": {"type": "object", "properties": {"k": {"const": "a"}, "v": INTEGER}, "required": ["k", "v"]},
                "b": {"type": "object", "properties": {"k": {"enum": ["b"]}, "w": INTEGER}, "required": ["k", "w"]},
            },
        },
        [{"k": "a", "v": 1}, {"k": "b", "w": 1}],
        [{"k": "a", "w": 1}],
    ),
    ({"allOf": [INTEGER]}, [1], ["a"]),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": INTEGER}}, [1], ["a"]),
    ({"type": "object", "properties": {"a": INTEGER, "n": {"$ref": "#"}}}, [{"a": 1, "n": {"a": 2}}], [{"n": {"a": "x"}}]),
    ({"type": "string", "pattern": "^a$|^b$"}, ["a", "b"], ["ab"]),
    ({"type": "integer", "multipleOf": 3}, [9], [4]),
    ({"format": "ipv4"}, ["0.10.255.99"], ["064.1.1.1", "1.2.3", "1.2.3.256"]),
    ({"type": "string", "format": "date"}, ["2024-12-31", "1999-02-28"], ["2023-02-31", "2023-04-31", "2023-13-01", "0000-01-01"]),
    (
        {"type": "string", "format": "date-time"},
        ["2024-12-31T23:59:59.5Z", "2024-01-01T00:00:00+02:00"],
        ["2024-12-31", "2024-02-30T00:00:00Z"],
    ),
    ({"type": "string", "format": "time"}, ["23:59:59Z"], ["24:00:00Z", "23:59:60Z", "1:00:00Z"]),
    ({"type": "array", "items": INTEGER, "uniqueItems": False}, [[1, 1]], [["a"]]),
    ({"type": "array", "minItems": 2}, [[1, "a"], [[], {}, None]], [[], [1], {}]),
    ({"minItems": 1}, [[True]], [[], "a"]),
    ({"type": "array"}, [[], [1, {"a": [2]}]], ["a"]),
    ({"type": "array", "prefixItems": [INTEGER], "minItems": 2}, [[1, "a"], [1, 2, 3]], [[1], ["a", 1]]),
    (True, [{"a": [1]}, 3], []),
    ({"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1}, [{"a": True}], [{}, {"a": 1}]),
    ({"title": "T", "description": "d", "default": {"not": 1}, "type": "null"}, [None], [1]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), KEPT, ids=lambda value: json.dumps(value)[:50])
def test_grammars_accept_what_the_schema_does(schema: Any, good: list[Any], bad: list[Any], grammar: Callable[..., Grammar]) -> None:
    compiled = grammar(json_schema=json.dumps(schema))
    for document in good:
        assert accepts(compiled, json.dumps(document)), document
        jsonschema.validate(document, schema)
    for document in bad:
        assert not accepts(compiled, json.dumps(document)), document


def accepts(grammar: Grammar, text: str) -> bool:
    import xgrammar

    state = xgrammar.GrammarMatcher(grammar.compiled)
    return bool(state.accept_string(text) and state.is_completed())


@pytest.mark.parametrize("pattern", ["^ab$", "^a|b$", "a|^b", "[^a$]+", r"\$\^", "(a|b)*", r"\d+[]^]", "x[\\]^]"])
def test_regexes_that_mean_what_they_say_pass(pattern: str) -> None:
    check_regex(pattern)


@pytest.mark.parametrize(
    ("pattern", "text"), [("a^", r"\^ at character 1"), ("(a$)b", r"\$ at character 2"), (r"a\Z", r"\\Z"), (r"\Qa", r"\\Q")]
)
def test_regexes_that_would_be_read_past_are_refused(pattern: str, text: str) -> None:
    with pytest.raises(GrammarFault, match=text):
        check_regex(pattern)


@pytest.mark.parametrize("pattern", ["[^a]+", ".{2}", r"\d\s\S\W", "[ -~]", r"\-\.\x41\u0042/"])
def test_patterns_of_json_strings_pass(pattern: str) -> None:
    check_json_pattern(pattern)


@pytest.mark.parametrize("pattern", ['a"', r"\"", r"\\", r"\n", r"[\t]", r"\x1f", r"\u0022", r"\u{5c}", r"\cA", r"\0", "a\n"])
def test_patterns_that_name_what_json_escapes_are_refused(pattern: str) -> None:
    with pytest.raises(GrammarFault, match="JSON writes with a backslash"):
        check_json_pattern(pattern)


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "string", "maxLength": 9}, {"type": "string", "pattern": ".*"}])
def test_strings_hold_no_raw_control_character(schema: dict[str, Any], grammar: Callable[..., Grammar], tokenizer: Tokenizer) -> None:
    compiled = grammar(json_schema=json.dumps(schema))
    assert num_valid(Matcher(compiled), tokenizer.encode('"ab"')) == 3
    for char in [*map(chr, range(32)), '"x', "\\ "]:
        assert num_valid(Matcher(compiled), tokenizer.encode(f'"ab{char}"')) < len(tokenizer.encode(f'"ab{char}"')), repr(char)
