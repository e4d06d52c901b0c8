"""Pieces of llguidance's Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cadenza_common.grammar.json_schema import OPTIONS, whole_sizes

ANY_TEXT = "(?s:.*)"
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as templates write it."""


def literal(text: str) -> str:
    """A text as it is."""
    return json.dumps(text, ensure_ascii=False)


def compact_json(schema: Mapping[str, Any]) -> str:
    """The JSON of a schema, compact."""
    text = json.dumps({**schema, OPTIONS: _COMPACT}, ensure_ascii=False)
    if ".0" in text:
        text = json.dumps(json.loads(text, object_hook=whole_sizes), ensure_ascii=False)
    return f"%json {text}"
