"""What a schema of arguments says, for formats that write each by itself: properties and which of them are required.

A grammar writes a part of what a schema allows: what would only allow more may be left out, and what is required only
sometimes may be required always.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from cadenza_common.grammar.schema_kinds import resolved

CHOICES = frozenset(("allOf", "anyOf", "oneOf"))
_KNOWN = frozenset(("type", "properties", "required", "dependentRequired", "minProperties", "maxProperties"))
_NO_MATTER = frozenset(
    "$anchor $comment $defs $id $schema additionalProperties default definitions deprecated description examples "
    "nullable patternProperties propertyNames readOnly strict title unevaluatedProperties writeOnly".split()
)
"""What says nothing about the properties that are named."""
UNWRITTEN = frozenset(("dependentRequired", "propertyNames", "oneOf"))
"""Keys of an object's schema that llguidance does not know."""
_MAX_VARIANTS = 16
_MAX_PARTS = 256


@dataclass(frozen=True, slots=True)
class ObjectSchema:
    """One choice of a schema."""

    properties: Mapping[str, Any]
    required: frozenset[str]
    excluded: frozenset[str] = frozenset()
    """Those that another choice requires, where one alone may hold."""


def object_variants(schema: Any, root: Mapping[str, Any]) -> list[ObjectSchema]:
    """The choices of a schema; raises ValueError for a key that cannot be kept to."""
    return _variants(schema, root, {})


def _variants(schema: Any, root: Mapping[str, Any], known: dict[int, list[ObjectSchema] | None]) -> list[ObjectSchema]:
    """known: those of the schemas that were met, by their identity; None while they are looked for."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ValueError("a schema that allows no object")
    place = id(schema)
    if place not in known:
        if len(known) >= _MAX_PARTS:
            raise ValueError("a schema of so many parts")
        known[place] = None
        known[place] = _own_variants(schema, root, known)
    found = known[place]
    if found is None:
        raise ValueError("a schema that is a choice of its own")
    return found


def _own_variants(
    schema: Mapping[str, Any], root: Mapping[str, Any], known: dict[int, list[ObjectSchema] | None]
) -> list[ObjectSchema]:
    unknown = sorted(key for key in schema.keys() - _KNOWN - _NO_MATTER - CHOICES if not key.startswith("x-"))
    if unknown:
        raise ValueError(unknown[0][:64])
    own = ObjectSchema(schema.get("properties") or {}, _required(schema))
    found = [own]
    for key in sorted(CHOICES & schema.keys()):
        parts = [_variants(each, root, known) for each in schema[key]]
        options = _all_of(parts) if key == "allOf" else [each for part in parts for each in part]
        if key == "oneOf":
            every = frozenset().union(*(each.required for each in options))
            options = [replace(each, excluded=each.excluded | every - each.required) for each in options]
        found = _pairs(found, options)
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    if any(len(each.required) < least or (most is not None and len(each.properties) > most) for each in found):
        raise ValueError("a number of properties")
    return found


def _all_of(parts: list[list[ObjectSchema]]) -> list[ObjectSchema]:
    found = [ObjectSchema({}, frozenset())]
    for part in parts:
        found = _pairs(found, part)
    return found


def _pairs(some: list[ObjectSchema], others: list[ObjectSchema]) -> list[ObjectSchema]:
    if len(some) * len(others) > _MAX_VARIANTS:
        raise ValueError("a schema of so many choices")
    return [_joined(pair) for pair in product(some, others)]


def _required(schema: Mapping[str, Any]) -> frozenset[str]:
    given = schema.get("dependentRequired")
    dependent = given if isinstance(given, Mapping) else {}
    return frozenset((*(schema.get("required") or ()), *(name for names in dependent.values() for name in names)))


def _joined(parts: tuple[ObjectSchema, ...]) -> ObjectSchema:
    properties: dict[str, Any] = {}
    for each in parts:
        for name, schema in each.properties.items():
            known = properties.get(name, schema)
            properties[name] = (
                schema if known in (True, {}, schema) else known if schema in (True, {}) else _both(known, schema)
            )
    required, excluded = (
        frozenset().union(*(getattr(each, name) for each in parts)) for name in ("required", "excluded")
    )
    kept = {name: schema for name, schema in properties.items() if name not in excluded - required}
    return ObjectSchema(kept, required, excluded)


def _both(one: Any, other: Any) -> Any:
    """A schema that keeps to two."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return (
            {**one, **other}
            if not (one.keys() & other.keys() - {"description", "title", "type"})
            else {"allOf": [one, other]}
        )
    return False


def flat(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of an object that keeps to one with keys that llguidance does not know; itself if there is none."""
    try:
        found = object_variants(schema, schema)
    except ValueError:
        return dict(schema)
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    options = [
        {
            "type": "object",
            "properties": dict(each.properties),
            "required": sorted(each.required),
            "additionalProperties": False,
        }
        for each in found
    ]
    return {**(options[0] if len(options) == 1 else {"anyOf": options}), **shared}
