"""The error of a chat that cannot be rendered."""

from __future__ import annotations

_MAX_CHARS = 500


class ChatError(Exception):
    """A chat cannot be rendered; `field` is the path of the wrong field within the chat, empty for the whole of it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def quoted(exc: Exception) -> str:
    """The message of a template's error, which may quote the chat, or its type if there is none."""
    text = str(exc) or type(exc).__name__
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"
