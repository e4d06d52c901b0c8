"""The small chats by which a chat template shows how a model writes calls and thoughts: the scheduler renders them."""

from __future__ import annotations

from typing import Any

EXAMPLE_USER, EXAMPLE_RESULT = "Qmuser", "Qmresult"
"""Texts of the user, and of a tool's result."""
EXAMPLE_THOUGHT, EXAMPLE_ANSWER = "Qmthought", "Qmanswer"
EXAMPLE_CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qmtool", {"qmname": "Qmvalue", "qmcount": 2, "qmlist": ["Qma", {"qmkey": "Qmb"}]}),
    ("qmother", {"qmname": "Qmlast"}),
)
"""Names and arguments of the calls of one turn."""
_KINDS = {"qmname": "string", "qmcount": "integer", "qmlist": "array"}
EXAMPLE_TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "a function",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": _KINDS[key], "description": "a value"} for key in arguments},
                "required": ["qmname"],
            },
        },
    }
    for name, arguments in EXAMPLE_CALLS
)
