"""Text that can be sent: what the wire's UTF-8 can hold."""

from __future__ import annotations


def sendable(text: str, spot: str) -> str:
    """The text; raises ValueError, beginning with `spot`, for lone surrogates, which are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{spot} holds a lone surrogate, {text[error.start]!r}, at position {error.start}") from None
    return text
