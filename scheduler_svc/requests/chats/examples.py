"""The small chats that show clients how the model writes tool calls and thoughts."""

from __future__ import annotations

import json

from cadenza_common.call_formats.examples import (
    EXAMPLE_ANSWER,
    EXAMPLE_CALLS,
    EXAMPLE_RESULT,
    EXAMPLE_THOUGHT,
    EXAMPLE_TOOLS,
    EXAMPLE_USER,
)
from scheduler_svc.requests.chats.fields import ChatFields, MessageFields, ToolCallFields

_USER = MessageFields("user", EXAMPLE_USER)
_IDS = ("qmid00001", "qmid00002")
"""Of nine letters and digits, which templates of Mistral demand."""


def example_chats() -> list[tuple[str, ChatFields]]:
    """The chats by the names of their texts."""
    tools = tuple(json.dumps(tool) for tool in EXAMPLE_TOOLS)
    thought = MessageFields("assistant", EXAMPLE_ANSWER, reasoning_content=EXAMPLE_THOUGHT)
    return [
        ("prompt", ChatFields((_USER,), tools=tools)),
        ("call", ChatFields(_called(1), tools=tools)),
        ("calls", ChatFields(_called(2), tools=tools)),
        ("thought", ChatFields((_USER, thought))),
        ("thought_and_call", ChatFields(_called(1, EXAMPLE_THOUGHT), tools=tools)),
    ]


def _called(num: int, thought: str | None = None) -> tuple[MessageFields, ...]:
    calls = tuple(
        ToolCallFields(name, json.dumps(arguments), identity)
        for identity, (name, arguments) in zip(_IDS[:num], EXAMPLE_CALLS[:num], strict=True)
    )
    results = (MessageFields("tool", EXAMPLE_RESULT, tool_call_id=call.id) for call in calls)
    return (_USER, MessageFields("assistant", tool_calls=calls, reasoning_content=thought), *results)
