"""Tools that /v1/responses has besides functions, as functions: Codex sends them, and cannot do without.

A custom tool takes a free text: here a function with that text as its one argument. A namespace is a group of tools, as
those of one MCP server: each is a function whose name begins with that of the group. Calls of them are answered, and
come back, as the API has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gateway_svc.fields.field import check_keys, shown
from gateway_svc.http.errors import bad_request

INPUT = "input"
_CUSTOM_KEYS = ("type", "name", "description", "format", "defer_loading")
_GROUP_KEYS = ("type", "name", "description", "tools")
_FORMAT_KEYS = {"text": ("type",), "grammar": ("type", "syntax", "definition")}
_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


def full_name(name: Any, namespace: Any) -> Any:
    """The name that the model sees of a tool of a namespace; None: of none."""
    if not isinstance(name, str) or not isinstance(namespace, str):
        return name
    return prefix_of(namespace) + name


def prefix_of(namespace: str) -> str:
    """What the names of a namespace's tools begin with."""
    return namespace if namespace.endswith("__") else f"{namespace}__"


def flat_tools(tools: Any) -> list[tuple[Any, str, str | None]]:
    """Each tool with its place in the request, and the namespace that it is in; raises ApiError."""
    found: list[tuple[Any, str, str | None]] = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "namespace":
            found.append((tool, where, None))
            continue
        check_keys(where, tool, _GROUP_KEYS, "tools")
        name, members, description = tool.get("name"), tool.get("tools"), tool.get("description")
        if not isinstance(name, str) or not name:
            raise bad_request(f"{where} must have a name, not {shown(name)}", "tools")
        if not isinstance(members, list):
            raise bad_request(f"{where}.tools must be a list of tools, not {shown(members)}", "tools")
        if description is not None and not isinstance(description, str):
            raise bad_request(f"{where} must have a string as description, not {shown(description)}", "tools")
        for number, member in enumerate(members):
            shown_member = member
            if isinstance(member, Mapping):
                shown_member = {**member, "name": full_name(member.get("name"), name)}
                if description and not number:  # no template shows groups
                    shown_member["description"] = "\n\n".join(filter(None, (description, member.get("description"))))
            found.append((shown_member, f"{where}.tools[{number}]", name))
    return found


def is_custom(tool: Any) -> bool:
    """Whether a tool, or the choice of one, is custom."""
    return isinstance(tool, Mapping) and tool.get("type") == "custom"


def custom_function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A custom tool as a function; raises ApiError."""
    check_keys(where, tool, _CUSTOM_KEYS, "tools")
    given = tool.get("format") or {"type": "text"}
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(kind, str) or kind not in _FORMAT_KEYS:
        raise bad_request(f"{where}.format must be of type text or grammar, not {shown(kind or given)}", "tools")
    check_keys(f"{where}.format", given, _FORMAT_KEYS[kind], "tools")
    description = tool.get("description")
    if kind == "grammar":
        syntax, definition = given.get("syntax"), given.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            message = f"{where}.format must have lark or regex as syntax, and a string as definition"
            raise bad_request(message, "tools")
        rule = f"{INPUT} must match this {'Lark grammar' if syntax == 'lark' else 'regular expression'}:\n{definition}"
        description = "\n\n".join(filter(None, (description, rule)))
    return {"name": tool.get("name"), "description": description, "parameters": _SCHEMA}


def input_of(arguments: str) -> str:
    """The text of a custom tool's call; of arguments that are none, they themselves. Cut ones have its beginning."""
    for end in ("", '"}', "}"):
        with suppress(ValueError, RecursionError):
            found = json.loads(arguments + end, strict=False)
            if isinstance(found, dict) and isinstance(text := found.get(INPUT), str):
                return text
    return arguments


def arguments_of(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)
