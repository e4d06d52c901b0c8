"""Values of others' files in messages: short, on one line, and nothing that a terminal obeys."""

from __future__ import annotations

_MOST = 100
_FEW = 8
"""Items of a list or an object that are shown."""


def brief(value: object) -> str:
    """Return a value for a message; what is long or nested is described."""
    if isinstance(value, list | dict):
        items = list(value.values()) if isinstance(value, dict) else value
        if len(value) > _FEW or any(isinstance(item, list | dict) for item in items):
            return f"an {'array' if isinstance(value, list) else 'object'} of {len(value)}"
        shown = [brief(item) for item in items]
        if isinstance(value, dict):
            text = "{" + ", ".join(f"{brief(key)}: {item}" for key, item in zip(value, shown, strict=True)) + "}"
        else:
            text = f"[{', '.join(shown)}]"
        return text if len(text) <= _MOST else f"{text[:_MOST]}..."
    if isinstance(value, int) and value.bit_length() > 4 * _MOST:  # more digits than Python writes
        return f"a number of {value.bit_length()} bits"
    text = repr(value[: _MOST + 1] if isinstance(value, str) else value)
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


def one_line(message: str, most: int) -> str:
    """Return a message on one line, without control characters, cut to `most` characters."""
    if len(message) > most:
        message = f"{message[:most]}... ({len(message)} characters)"
    return message if message.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
