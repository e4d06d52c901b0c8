"""Objects without properties that their schema does not name, and those that stay open."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cadenza_common.grammar.closing import closed
from cadenza_common.grammar.compiling import new_matcher
from cadenza_common.grammar.spec import GrammarSpec

llguidance = pytest.importorskip("llguidance")
TABLE = llguidance.LLTokenizer("byte")
NUMBER = {"type": "integer"}


def a(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: NUMBER}, "required": [name], **more}


def fits(schema: dict[str, Any], value: Any) -> bool:
    spec = GrammarSpec("json_schema", json.dumps(schema), disable_additional_properties=True)
    matcher, text = new_matcher(spec, TABLE), json.dumps(value).encode()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (a("x"), {"x": 1}, {"x": 1, "y": 1}),
        (a("x", properties={"x": a("y")}), {"x": {"y": 1}}, {"x": {"y": 1, "z": 1}}),
        ({"type": "array", "items": a("x")}, [{"x": 1}], [{"x": 1, "y": 1}]),
        ({"anyOf": [a("x"), {"type": "null"}]}, {"x": 1}, {"x": 1, "y": 1}),
        ({"$defs": {"A": a("x")}, "$ref": "#/$defs/A"}, {"x": 1}, {"x": 1, "y": 1}),
        ({"$defs": {"A": a("x")}, "allOf": [{"$ref": "#/$defs/A"}], "title": "t"}, {"x": 1}, {"x": 1, "y": 1}),
        (a("x", anyOf=[{"required": ["x"]}, {"required": ["x", "x"]}]), {"x": 1}, {"x": 1, "y": 1}),
        ({"type": "object", "properties": {}}, {}, {"y": 1}),
    ],
)
def test_objects_have_the_properties_that_are_named(schema, good, bad):
    assert fits(schema, good)
    assert not fits(schema, bad)


@pytest.mark.parametrize(
    ("schema", "good"),
    [
        ({"type": "object"}, {"y": 1}),
        (a("x", additionalProperties=True), {"x": 1, "y": 1}),
        (a("x", additionalProperties=NUMBER), {"x": 1, "y": 1}),
        (a("x", patternProperties={"^y$": NUMBER}), {"x": 1, "y": 1}),
        ({"allOf": [a("x"), a("y")]}, {"x": 1, "y": 1}),
        ({"$defs": {"A": a("x")}, "allOf": [{"$ref": "#/$defs/A"}, a("y")]}, {"x": 1, "y": 1}),
        (a("x", anyOf=[a("y"), a("z")]), {"x": 1, "z": 1}),
        ({"$defs": {"A": a("x")}, **a("y"), "$ref": "#/$defs/A"}, {"y": 1, "x": 1}),
        ({"$defs": {"A": {"allOf": [a("x"), a("z")]}}, "anyOf": [{"$ref": "#/$defs/A"}]}, {"x": 1, "z": 1}),
    ],
)
def test_objects_of_which_more_is_said_stay_open(schema, good):
    assert fits(schema, good)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [], "allOf": 3, "items": 4, "$ref": 5},
        {"anyOf": [1, None], "properties": {"a": 1}, "additionalProperties": None, "$defs": "x"},
        {"$ref": "#/nowhere"},
    ],
)
def test_what_is_no_schema_stays(schema):
    assert closed(schema) == schema


def test_references_in_circles_and_deep_schemas_have_an_end():
    circle = {f"d{index}": {"allOf": [{"$ref": f"#/$defs/d{(index + 1) % 40}"}] * 10} for index in range(40)}
    assert closed({"$defs": circle, **circle["d0"]}) == {"$defs": circle, **circle["d0"]}
    deep: dict[str, Any] = a("x")
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    assert closed(deep) == deep
