"""Objects that have no properties but those that their schema names, where it does not say.

vLLM, SGLang and llama.cpp write objects so. By JSON schema an object may have any other property, and a small model
writes such ones until its output is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cadenza_common.grammar.schema_kinds import resolved

CHOICES = ("allOf", "anyOf", "oneOf")
NAMED_SCHEMAS = ("$defs", "definitions", "properties", "patternProperties")
_VALUES = ("additionalProperties", "items", "prefixItems")
_OPEN = frozenset("additionalProperties patternProperties propertyNames unevaluatedProperties".split())
"""What a schema says about further properties."""
_CONDITIONS = frozenset("$dynamicRef dependentSchemas else if not then".split())
_MAX_DEPTH = 64
_NAMES_NOTHING = frozenset(("required", "title", "description", "$comment"))


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema whose objects have the properties that it names alone.

    An object of which several schemas speak stays open: each names a part of its properties.
    """
    found = _close(schema, _parts(schema))
    assert isinstance(found, dict)
    return found


def _close(value: Any, parts: set[int], depth: int = 0) -> Any:
    if isinstance(value, list):
        return [_close(each, parts, depth) for each in value]
    if not isinstance(value, Mapping) or depth > _MAX_DEPTH:
        return value
    found = dict(value)
    for name in (*CHOICES, *_VALUES):
        if isinstance(value.get(name), (Mapping, list)):
            found[name] = _close(value[name], parts, depth + 1)
    for name in NAMED_SCHEMAS:
        if isinstance(value.get(name), Mapping):
            found[name] = {key: _close(each, parts, depth + 1) for key, each in value[name].items()}
    is_whole = id(value) not in parts and not _speaks_with_others(value)
    if isinstance(value.get("properties"), Mapping) and is_whole and not _OPEN & value.keys():
        found["additionalProperties"] = False
    return found


def _parts(root: Mapping[str, Any]) -> set[int]:
    """The schemas, by identity, beside which another one speaks of the same object."""
    rest: list[tuple[Any, bool]] = [(root, False)]
    seen: set[tuple[int, bool]] = set()
    while rest:
        schema, is_part = rest.pop()
        if not isinstance(schema, Mapping) or (id(schema), is_part) in seen:
            continue
        seen.add((id(schema), is_part))
        is_shared = is_part or _speaks_with_others(schema) or len(_listed(schema.get("allOf"))) > 1
        rest += [(each, is_shared) for name in CHOICES for each in _listed(schema.get(name))]
        if "$ref" in schema:
            rest.append((resolved({"$ref": schema["$ref"]}, root), is_shared))
        rest += [(each, False) for each in _within(schema)]
    return {place for place, is_part in seen if is_part}


def _speaks_with_others(schema: Mapping[str, Any]) -> bool:
    """Whether a schema names properties of an object beside its choices, references or conditions."""
    if not schema.keys() & {"properties", *_OPEN}:
        return bool(schema.keys() & _CONDITIONS) or sum(name in schema for name in (*CHOICES, "$ref")) > 1
    choices = [each for name in CHOICES for each in _listed(schema.get(name))]
    names_more = any(not isinstance(each, Mapping) or each.keys() - _NAMES_NOTHING for each in choices)
    return names_more or "$ref" in schema or bool(schema.keys() & _CONDITIONS)


def _within(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas of other values: those in an object or a list, and definitions."""
    for name in _VALUES:
        value = schema.get(name)
        yield from value if isinstance(value, list) else [value]
    for name in NAMED_SCHEMAS:
        if isinstance(value := schema.get(name), Mapping):
            yield from value.values()


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
