"""A terminal's screen as an SVG picture."""

from __future__ import annotations

import io
from pathlib import Path

from pyte.screens import Char
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tests.helpers.terminal import Terminal

_NAMES = {"brown": "yellow", "default": None}


def save_picture(terminal: Terminal, path: Path, title: str) -> None:
    """Write the screen as it is now, without its empty last lines."""
    rows = terminal.cells
    while rows and not any(char.data.strip() for char in rows[-1]):
        rows.pop()
    console = Console(
        record=True, width=len(rows[0]), file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    for row in rows:
        console.print(Text.assemble(*((char.data, _style(char)) for char in row), no_wrap=True, end="\n"))
    path.write_text(console.export_svg(title=title, unique_id=path.stem), encoding="utf-8")


def _style(char: Char) -> Style:
    return Style(color=_colour(char.fg), bgcolor=_colour(char.bg), bold=char.bold, reverse=char.reverse)


def _colour(name: str) -> str | None:
    if name.startswith("bright"):
        return f"bright_{name.removeprefix('bright').removeprefix('brown') or 'yellow'}"
    if len(name) == 6 and name not in _NAMES and all(digit in "0123456789abcdef" for digit in name):
        return f"#{name}"
    return _NAMES.get(name, name)
