"""Server-sent events as text (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_NO_TEXT = "replace"
"""What a client repeats, such as metadata, may hold halves of surrogate pairs."""
DONE = b"data: [DONE]\n\n"
dumps: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""JSON in its shortest form."""


def data_event(value: Any) -> bytes:
    """An event of OpenAI's older APIs, which has data alone."""
    return f"data: {dumps(value)}\n\n".encode(errors=_NO_TEXT)


def named_event(value: dict[str, Any]) -> bytes:
    """An event with the name that its data have as type."""
    return f"event: {value['type']}\ndata: {dumps(value)}\n\n".encode(errors=_NO_TEXT)
