"""Model output on a terminal."""

from __future__ import annotations

import sys
import unicodedata


def printable(text: str) -> str:
    """The text without control characters other than newline and tab: a model must not steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def typed(text: str) -> str:
    """An argument or input line with bytes that are no UTF-8 replaced: Python hands them on as lone surrogates."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def write(text: str) -> None:
    """Write model output to stdout at once."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def notice(text: str) -> None:
    """One line beside the output."""
    sys.stderr.write(f"cadenza: {text}\n")
