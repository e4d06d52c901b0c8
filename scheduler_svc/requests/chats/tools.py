"""Tools with all that templates read of them, though OpenAI's API lets clients leave it out.

Templates add descriptions to texts, walk through properties, and know a type by its one name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from scheduler_svc.requests.chats.json_objects import json_object


def full_tools(tools: tuple[str, ...]) -> tuple[str, ...]:
    """Return tools with empty descriptions and parameters where they have none; raises ChatError if one is no JSON."""
    return tuple(_full(text, f"tools[{index}]") for index, text in enumerate(tools))


def _full(text: str, path: str) -> str:
    tool = json_object(text, path)
    function = tool.get("function")
    if not isinstance(function, dict):
        return text
    parameters = function.get("parameters")
    given = parameters if isinstance(parameters, dict) else {}
    schema = _described({"type": "object", "properties": {}, **given})
    full = {**tool, "function": {"description": "", **function, "parameters": schema}}
    return text if full == tool else json.dumps(full, ensure_ascii=False)


def _described(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object, each property with a description, and a choice in place of a list of types."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return dict(schema)
    return {**schema, "properties": {name: _property(each) for name, each in properties.items()}}


def _property(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    full = {"description": "", **schema}
    kinds = full.get("type")
    if isinstance(kinds, list) and "anyOf" not in full:
        del full["type"]
        full["anyOf"] = [{"type": each} for each in kinds]
    return _described(full)
