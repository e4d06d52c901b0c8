"""What JSON schemas of constraints become before llguidance reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WHITESPACE = r"( | ?\r?\n[ \t]{0,40})"
"""Between the parts of JSON, as models write it: a space, or a line break and an indent. A small model that may write
any whitespace writes nothing else until its output is cut."""
OPTIONS = "x-guidance"
"""The key of a schema that has llguidance's own options."""
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def with_whitespace(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with the whitespace of models, unless it says something about whitespace itself."""
    options = schema.get(OPTIONS, {})
    if not isinstance(options, Mapping) or {"whitespace_flexible", "whitespace_pattern"} & options.keys():
        return dict(schema)
    return {**schema, OPTIONS: {**options, "whitespace_pattern": WHITESPACE}}


def whole_sizes(value: dict[str, Any]) -> dict[str, Any]:
    """An object of a schema with 3 for 3.0 as a size, which JSON schema allows and llguidance does not.

    For use as `object_hook` of json.loads.
    """
    for name in _SIZES:
        if isinstance(number := value.get(name), float) and number.is_integer():
            value[name] = int(number)
    return value
