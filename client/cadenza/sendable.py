"""Checks that text can be encoded as UTF-8 for sending, and shows what cannot be sent."""

from __future__ import annotations


def sendable(text: str, spot: str) -> str:
    """The text; raises a ValueError that begins with `spot` for lone surrogates, which are not characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{spot} holds a lone surrogate, {text[error.start]!r}, at position {error.start}") from None
    return text


def short(value: object) -> str:
    """The type of a wrong value and its beginning, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
