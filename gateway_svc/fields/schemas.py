"""The tables of fields as JSON schemas (https://json-schema.org/draft/2020-12/schema)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway_svc.fields.field import Field, Use

_TEXT = {"type": "string"}
KIND_SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "any": {},
    "a string": _TEXT,
    "an integer": {"type": "integer"},
    "a number": {"type": "number"},
    "a boolean": {"type": "boolean"},
    "an object": {"type": "object"},
    "an object of strings": {"type": "object", "additionalProperties": _TEXT},
    "a list": {"type": "array"},
    "a list of strings": {"type": "array", "items": _TEXT},
    "a list of integers": {"type": "array", "items": {"type": "integer"}},
    "a string or a list of strings": {"type": ["string", "array"], "items": _TEXT},
    "a string or an object": {"type": ["string", "object"]},
    "a string or a list": {"type": ["string", "array"]},
}
"""By a kind of field.KINDS."""


def body_schema(table: Mapping[str, Field], required: tuple[str, ...]) -> dict[str, Any]:
    """What a body may be, but for what is within its fields."""
    return {
        "type": "object",
        "properties": {field.name: _field_schema(field, field.name in required) for field in table.values()},
        "required": list(required),
        "additionalProperties": False,
    }


def _field_schema(field: Field, is_required: bool) -> dict[str, Any]:
    """One field; null is as if absent."""
    if field.use is Use.REFUSED:
        return {"enum": [*field.neutral, None], "description": f"not supported: {field.ours}"}
    schema = dict(KIND_SCHEMAS[field.kind])
    if "type" in schema and not is_required:
        given = schema["type"]
        schema["type"] = [*(given if isinstance(given, list) else [given]), "null"]
    return {**schema, "description": field.ours}
