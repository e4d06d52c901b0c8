"""The scheduler's limits of lists and texts (scheduler_svc/convert/limits.py), checked where a body is read.

What is over one is refused there anyway: here it costs the gateway no objects, and no message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized

from gateway_svc.http.errors import bad_request

MAX_MESSAGES = 512
"""Of a chat."""
MAX_TURNS = 4 * MAX_MESSAGES
"""Entries of a request's `input` or `messages` of which several may become one message."""
MAX_CALLS = 512
"""Of all messages of a chat."""
MAX_DOCUMENTS = 1024
MAX_PROMPT_TOKENS = 131_072
MAX_TOOLS = 512
MAX_TOOL_CHARS = 1_048_576
"""Of all tools together, as JSON."""
MAX_CONSTRAINT_CHARS = 262_144
MAX_METADATA = 512
"""Entries of the metadata that an answer repeats; this one is the gateway's own."""
MAX_ENTRIES: Mapping[str, int] = {
    "stop": 128,
    "stop_token_ids": 1024,
    "logit_bias": 2048,
    "allowed_token_ids": 131_072,
    "bad_words": 128,
}
"""Of sampling parameters."""


def check_entries(name: str, value: Sized, most: int, param: str | None = None) -> None:
    """Raise ApiError for a list or an object with too many entries; param: its field if it has another name."""
    if len(value) > most:
        raise bad_request(f"{name} has {len(value)} entries; at most {most} are allowed", param or name)
