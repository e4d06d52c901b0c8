"""Model output and figures on a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from cadenza.info import DeviceMemory

PIPE_CELLS = 1000
"""The width of a table in a pipe, where no line is wrapped."""


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


def memory_parts(parts: Sequence[DeviceMemory]) -> list[str]:
    """What an executor takes of a GPU's memory, part by part: as measured, and as computed before."""
    return [
        f"{printable(part.name)} {'-' * (part.measured_bytes < 0)}{size(abs(part.measured_bytes))} "
        f"({size(part.computed_bytes)} computed)"
        for part in parts
    ]


def write(text: str) -> None:
    """Write model output to stdout and flush."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def notice(text: str) -> None:
    """Write one line to stderr; in a terminal, words that do not fit are on the next line."""
    line = f"cadenza: {text}"
    width = terminal_width(sys.stderr)
    if width is not None:
        from cadenza_cli.wrapping import wrap

        line = wrap(line, width)
    sys.stderr.write(f"{line}\n")


def terminal_width(stream: TextIO) -> int | None:
    """Cells of a line of the terminal that the stream writes to; None if it is none."""
    try:
        if not stream.isatty():
            return None
        return os.get_terminal_size(stream.fileno()).columns or shutil.get_terminal_size().columns
    except (OSError, ValueError):  # the stream has no file, or is closed
        return None
