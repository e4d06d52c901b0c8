"""Checks that text can be encoded as UTF-8 for sending."""

from __future__ import annotations


def sendable(text: str, spot: str) -> str:
    """The text; raises a ValueError that begins with `spot` for lone surrogates, which are not characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{spot} holds a lone surrogate, {text[error.start]!r}, at position {error.start}") from None
    return text
