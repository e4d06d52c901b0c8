"""Model output and figures on a terminal."""

from __future__ import annotations

import sys
import unicodedata


def printable(text: str) -> str:
    """The text without control characters other than newline and tab: a model must not control the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def typed(text: str) -> str:
    """An argument or input line with invalid UTF-8 replaced: Python passes such bytes as lone surrogates."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def number(value: float | None, none: str = "-") -> str:
    """A number with three significant digits and all integer digits; `none` if there is no value."""
    return none if value is None else f"{value:,.3g}" if value < 999.5 else f"{value:,.0f}"


def size(num_bytes: int) -> str:
    """Bytes in binary units, from KiB on."""
    value: float = num_bytes
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024 or unit == "TiB":
            break
    return f"{value:.1f} {unit}"


def write(text: str) -> None:
    """Write model output to stdout and flush."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def notice(text: str) -> None:
    """Write one line to stderr."""
    sys.stderr.write(f"cadenza: {text}\n")
