"""Lines of a full-screen view: rows with a name and a value, chosen and shortened so that they fit, and bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.:-=+*#"


@dataclass(frozen=True, slots=True)
class LineGroup:
    """Lines that are shown together; if the terminal is too low, those with the smallest `keep` are left out."""

    lines: Sequence[Text]
    keep: float


def fit(rows: Sequence[LineGroup], height: int) -> list[Text]:
    """The lines of the rows that fit into `height` lines, in the given order."""
    chosen, free = set(), height
    for index in sorted(range(len(rows)), key=lambda index: -rows[index].keep):
        if len(rows[index].lines) <= free:
            chosen.add(index)
            free -= len(rows[index].lines)
    return [line for index, row in enumerate(rows) if index in chosen for line in row.lines]


def elide(text: str, width: int, *, ascii_only: bool = False) -> str:
    """The text in at most `width` cells; a longer one loses its beginning, because the ends of names differ."""
    if cell_len(text) <= width:
        return text
    mark = "..." if ascii_only else "…"
    while text and cell_len(mark) + cell_len(text) > width:
        text = text[1:]
    return set_cell_size(mark + text, width) if width > 0 else ""


def named(name: str, parts: Sequence[str], *, name_cells: int, width: int, ascii_only: bool = False) -> list[Text]:
    """A name and its parts, separated by commas, in as many lines as they need; a part is never split."""
    lines: list[str] = []
    room = width - name_cells - 1  # for the comma
    for part in (elide(each, room, ascii_only=ascii_only) for each in parts if each):
        if lines and cell_len(lines[-1]) + 2 + cell_len(part) <= room:
            lines[-1] += f", {part}"
        else:
            if lines:
                lines[-1] += ","
            lines.append(part)
    names = [name] + [""] * len(lines)
    return [
        Text.assemble((f"{each:{name_cells}}", "cyan"), line) for each, line in zip(names, lines or ["-"], strict=False)
    ]


def sparkline(values: Sequence[float | None], *, top: float, ascii_only: bool = False) -> str:
    """One character for each of `values` [n]: the lowest bar is 0, the highest is `top` and above, None is a space.

    `ascii_only` is for terminals that cannot show the bars.
    """
    bars = _ASCII_BARS if ascii_only else _BARS
    return "".join(" " if value is None else bars[_place(value, top, len(bars) - 1)] for value in values)


def _place(value: float, top: float, highest: int) -> int:
    return max(0, min(highest, round(highest * value / top))) if top > 0 else 0
