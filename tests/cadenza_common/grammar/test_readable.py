"""Schemas as pydantic and zod write them, which llguidance does not read as they are."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from cadenza_common.grammar.child import what_is_wrong
from cadenza_common.grammar.compiling import new_matcher
from cadenza_common.grammar.readable import readable
from cadenza_common.grammar.spec import GrammarSpec

llguidance = pytest.importorskip("llguidance")
TABLE = llguidance.LLTokenizer("byte")


def fits(schema: dict[str, Any], value: Any) -> bool:
    """Whether an output may be this value, and end there."""
    matcher = new_matcher(GrammarSpec("json_schema", json.dumps(schema)), TABLE)
    text = json.dumps(value).encode()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


def model(name: str, required: bool = True, **properties: Any) -> dict[str, Any]:
    kind = {"const": name, "default": name, "type": "string"}
    return {
        "type": "object",
        "properties": {"kind": kind, **properties},
        "required": ["kind", *properties] if required else list(properties),
    }


def union(*options: Any, **definitions: Any) -> dict[str, Any]:
    return {
        "$defs": definitions,
        "type": "object",
        "properties": {"pet": {"discriminator": {"propertyName": "kind"}, "oneOf": list(options)}},
        "required": ["pet"],
    }


CAT, DOG = {"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}
FLAG, NUMBER = {"type": "boolean"}, {"type": "integer"}


@pytest.mark.parametrize("required", [True, False], ids=["required", "by default"])
def test_choices_that_a_property_tells_apart(required):
    schema = union(CAT, DOG, Cat=model("cat", required, lives=NUMBER), Dog=model("dog", required, good=FLAG))
    assert fits(schema, {"pet": {"kind": "cat", "lives": 9}})
    assert fits(schema, {"pet": {"kind": "dog", "good": True}})
    assert not fits(schema, {"pet": {"kind": "cat", "good": True}})
    assert not fits(schema, {"pet": {"lives": 9, "good": True}})  # pydantic finds no tag there
    assert not fits(schema, {"pet": {"lives": 9}})


def test_such_choices_within_each_other():
    node = model("node", False, kids={"type": "array", "items": {"oneOf": [{"$ref": "#/$defs/Node"}, CAT]}})
    schema = union({"$ref": "#/$defs/Node"}, CAT, Node=node, Cat=model("cat", False))
    assert fits(schema, {"pet": {"kind": "node", "kids": [{"kind": "cat"}, {"kind": "node", "kids": []}]}})
    assert not fits(schema, {"pet": {"kind": "node", "kids": [{"kids": []}]}})
    inner = {"oneOf": [CAT, DOG]}
    schema = union(inner, {"$ref": "#/$defs/Node"}, Node=node, Cat=model("cat"), Dog=model("dog"))
    assert fits(schema, {"pet": {"kind": "dog"}})
    assert not fits(schema, {"pet": {}})


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ([{"type": "string"}, {"type": "null"}, NUMBER], ["a", None, 1], [True]),
        ([{"enum": ["a", "b"]}, {"const": "c"}, {"enum": [1]}], ["a", "c", 1], ["d", 2]),
        ([CAT, {"type": "string"}, DOG], [{"kind": "dog"}, "x"], [{"kind": "x"}, 1]),
        ([{"allOf": [CAT]}, DOG], [{"kind": "cat"}], [{}]),
    ],
)
def test_choices_of_other_kinds(options, good, bad):
    schema = {"$defs": {"Cat": model("cat"), "Dog": model("dog", False)}, "oneOf": options}
    assert all(fits(schema, each) for each in good)
    assert not any(fits(schema, each) for each in bad)


@pytest.mark.parametrize(
    "options",
    [
        [{"type": "number"}, {"type": "integer"}],
        [{"type": "string"}, {"type": "string", "minLength": 2}],
        [{"enum": ["a", "b"]}, {"enum": ["b"]}],
        [{"const": 1}, {"const": 1.0}],
        [CAT, {"$ref": "#/$defs/Cat"}],
        [{"type": "object"}, {"type": ["object", "null"]}],
    ],
)
def test_choices_that_one_value_may_fit_are_refused_in_words(options):
    schema = {"$defs": {"Cat": model("cat")}, "oneOf": options}
    error = what_is_wrong({"kind": "json_schema", "text": json.dumps(schema)}, TABLE)
    assert error.startswith("oneOf: a value may fit two of its choices"), error


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "format": "password"}, ["x"], [1]),
        ({"type": "integer", "format": "int32"}, [1], ["x"]),
        ({"type": "string", "format": "ulid", "pattern": "^[0-7]{2}$"}, ["07"], ["08"]),
        ({"type": "string", "format": "date"}, ["2026-11-30"], ["x"]),
        (
            {"type": "object", "properties": {"format": {"const": "password"}}},
            [{"format": "password"}],
            [{"format": 1}],
        ),
        ({"type": "object", "properties": {"f": {"not": {}}}, "additionalProperties": False}, [{}], [{"f": 1}]),
        ({"enum": [{"format": "password", "oneOf": [1]}]}, [{"format": "password", "oneOf": [1]}], [{"oneOf": [1]}]),
    ],
)
def test_formats_are_notes_and_what_allows_nothing_is_left_out(schema, good, bad):
    assert all(fits(schema, each) for each in good)
    assert not any(fits(schema, each) for each in bad)


@pytest.mark.parametrize(
    ("names", "others", "good", "bad"),
    [
        ({"type": "string"}, NUMBER, [{"x": 1}], [{"x": "y"}]),
        ({"type": "string", "format": "uri"}, NUMBER, [{"x": 1}], [{"x": "y"}]),
        ({"enum": ["a", "b"]}, NUMBER, [{"a": 1, "b": 2}, {"b": 1}], [{"c": 1}, {"a": "x"}]),
        ({"const": "a"}, True, [{"a": "x"}], [{"c": 1}]),
        ({"type": "string", "pattern": "^[a-z]+$"}, NUMBER, [{"ab": 1}], [{"A": 1}, {"a": "x"}]),
        ({"minLength": 2, "maxLength": 3}, NUMBER, [{"ab": 1, "abc": 2}], [{"a": 1}, {"abcd": 1}]),
    ],
)
def test_names_of_properties(names, others, good, bad):
    schema = {"type": "object", "propertyNames": names, "additionalProperties": others}
    assert all(fits(schema, each) for each in good)
    assert not any(fits(schema, each) for each in bad)


def test_names_beside_properties():
    schema = {
        "type": "object",
        "properties": {"a": FLAG, "c": FLAG},
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": NUMBER,
    }
    assert fits(schema, {"a": True, "b": 1})
    assert not fits(schema, {"a": 1})
    assert not fits(schema, {"c": True})
    for names in ({"type": "integer"}, {"pattern": "a", "minLength": 3}, {"not": {"const": "a"}}):
        error = what_is_wrong({"kind": "json_schema", "text": json.dumps({**schema, "propertyNames": names})}, TABLE)
        assert "propertyNames" in error


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": "x", "properties": [], "required": "kind"},
        {"oneOf": [1, None], "propertyNames": 3, "format": {}},
        {"oneOf": [{"properties": 1}, {"type": "object", "required": 1, "properties": {"a": 1}}, {"allOf": 2}]},
        {"properties": {"a": {"oneOf": [{"$ref": "#/nowhere"}, {"$ref": "#"}]}}},
    ],
)
def test_what_is_no_schema_is_left_to_the_compiler(schema):
    assert readable(schema) == schema
    assert what_is_wrong({"kind": "json_schema", "text": json.dumps(schema)}, TABLE)


@pytest.mark.parametrize("key", ["allOf", "anyOf", "oneOf"])
def test_references_in_circles_take_no_time(key):
    """Each of twenty definitions names ten times the next one: a walk along all paths would never end."""
    count, references = 20, []
    for index in range(count):
        references.append([{"$ref": f"#/$defs/d{(index + 1) % count}"}] * 10)
    definitions = {f"d{index}": {"type": "object", key: each} for index, each in enumerate(references)}
    untyped = {f"u{index}": {key: [{"$ref": f"#/$defs/u{(index + 1) % count}"}] * 10} for index in range(count)}
    options = [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d1"}, {"$ref": "#/$defs/u0"}]
    found = readable({"$defs": {**definitions, **untyped}, "oneOf": options})
    assert found["oneOf"] == options


def test_many_choices_with_many_properties_take_no_time():
    option = {"type": "object", "properties": {f"a{number}": {"const": 0} for number in range(20_000)}}
    schema = {"$defs": {"A": option}, "oneOf": [{"$ref": "#/$defs/A"}] * 128}
    began = time.process_time()
    assert readable(schema)["oneOf"] == schema["oneOf"]
    assert time.process_time() - began < 5  # 128 times as long where each is compared with each


def test_a_schema_that_is_nested_without_an_end_is_left():
    deep: dict[str, Any] = {"type": "string", "format": "password"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    assert "password" in json.dumps(readable(deep))
