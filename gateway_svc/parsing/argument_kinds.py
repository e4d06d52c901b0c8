"""What an argument may be by its JSON schema, for formats that write all values as bare text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Kinds = frozenset[str]
"""Types of JSON schema: string, integer, number, boolean, null, array, object; none: nothing is known."""
_MAX_DEPTH = 16
TEXT: Kinds = frozenset(("string",))


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Kinds:
    """The types that a schema allows, as far as it says; `root` has its definitions."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset((given,))
    if isinstance(given, list):
        return frozenset(each for each in given if isinstance(each, str))
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset(map(kind_of_value, values))
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            found = [kinds_of(option, root, depth + 1) for option in options]
            return frozenset().union(*found) if all(found) else frozenset()
    if isinstance(options := schema.get("allOf"), list):
        known = [kinds for option in options if (kinds := kinds_of(option, root, depth + 1))]
        return frozenset.intersection(*known) if known else frozenset()
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


def fits(value: Any, kinds: Kinds) -> bool:
    """Whether a JSON value is of one of these types."""
    kind = kind_of_value(value)
    return kind in kinds or (kind == "integer" and "number" in kinds)


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
