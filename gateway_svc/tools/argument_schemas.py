"""Schemas of single arguments, for formats that write each by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHARED = ("$defs", "definitions")
_WHOLE = "cadenza-whole"
"""The name, among an argument's definitions, of the schema that it is taken from."""
_MAX_DEPTH = 64
"""Schemas that are nested deeper are refused where they are rendered."""


def argument_schema(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of one argument as a document; whole: that of all arguments, which its references are about."""
    found: dict[str, Any] = _moved(dict(schema))
    found |= {name: _moved(whole[name]) for name in _SHARED if name in whole}
    if _refers(found):
        others = {name: _moved(value) for name, value in whole.items() if name not in _SHARED}
        found["$defs"] = {**found.get("$defs", {}), _WHOLE: others}
    return found


def _moved(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """A part of a schema, in which references to the whole one are to its new place."""
    if isinstance(value, list) and depth:
        return [_moved(each, depth - 1) for each in value]
    if not isinstance(value, dict) or not depth:
        return value
    return {
        name: _place(inner) if name == "$ref" and isinstance(inner, str) else _moved(inner, depth - 1)
        for name, inner in value.items()
    }


def _place(reference: str) -> str:
    is_moved = reference == "#" or (reference.startswith("#/") and reference.split("/")[1] not in _SHARED)
    return f"#/$defs/{_WHOLE}{reference[1:]}" if is_moved else reference


def _refers(value: Any, depth: int = _MAX_DEPTH) -> bool:
    """Whether there is a reference to the whole schema."""
    if not isinstance(value, (dict, list)) or not depth:
        return False
    inner = value.values() if isinstance(value, dict) else value
    reference = value.get("$ref") if isinstance(value, dict) else None
    is_whole = isinstance(reference, str) and reference.startswith(f"#/$defs/{_WHOLE}")
    return is_whole or any(_refers(each, depth - 1) for each in inner)
