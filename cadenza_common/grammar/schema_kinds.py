"""What the values of a JSON schema may be, as far as the schema says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Kinds = frozenset[str]
"""Types of JSON schema: string, integer, number, boolean, null, array, object; none: nothing is known."""
_MAX_DEPTH = 16


def kinds_of(schema: Any, root: Mapping[str, Any]) -> Kinds:
    """The types that a schema allows, as far as it says; `root` has its definitions."""
    return _kinds(schema, root, {}, 0)


def _kinds(schema: Any, root: Mapping[str, Any], known: dict[int, Kinds], depth: int) -> Kinds:
    """known: those of the schemas that were met, by their identity. Nothing is known of one within itself."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    if id(schema) not in known:
        known[id(schema)] = frozenset()
        known[id(schema)] = _own_kinds(schema, root, known, depth)
    return known[id(schema)]


def _own_kinds(schema: Mapping[str, Any], root: Mapping[str, Any], known: dict[int, Kinds], depth: int) -> Kinds:
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset((given,))
    if isinstance(given, list):
        return frozenset(each for each in given if isinstance(each, str))
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset(map(kind_of_value, values))
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            found = [_kinds(option, root, known, depth + 1) for option in options]
            return frozenset().union(*found) if all(found) else frozenset()
    if isinstance(options := schema.get("allOf"), list):
        some = [kinds for option in options if (kinds := _kinds(option, root, known, depth + 1))]
        return frozenset.intersection(*some) if some else frozenset()
    return frozenset()


def kind_of_value(value: Any) -> str:
    """The type of a JSON value; a whole number is an integer."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case list():
            return "array"
    return "object"


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follow a schema's references; None for a reference that leads nowhere."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        schema = root
        for name in reference.removeprefix("#").split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return None
