"""Terminal tables that never truncate numbers: labels wrap, and columns that do not fit continue below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

_LABEL = 24
"""Width at which a label wraps before columns move below."""
_HEAD = 12
"""Width at which a line of a head wraps, such as a file's label."""

Cell = str | Text


@dataclass(frozen=True, slots=True)
class NumberTable:
    """Rows of a label and numbers; columns that do not fit in the width follow in further tables below.

    Newlines separate the lines of a head. Columns whose indices are in `text_columns` are left-aligned, as labels are.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    caption: str = ""
    text_columns: Sequence[int] = ()
    expand: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        wanted = self._widths()
        parts = list(_parts(wanted, options.max_width))
        for index, places in enumerate(parts):
            table = Table(
                box=SIMPLE_HEAD,
                title=Text(self.title) if self.title and not index else None,
                title_justify="left",
                title_style="bold",
                caption=Text(self.caption) if self.caption and index == len(parts) - 1 else None,
                caption_justify="left",
                padding=(0, 0, 0, 1),
                expand=self.expand,
            )
            room = options.max_width - _taken([wanted[place] for place in places])
            table.add_column(Text(self.heads[0]), width=max(1, min(wanted[0], room)), overflow="fold")
            for place in places:
                table.add_column(
                    Text(self.heads[place]),
                    width=wanted[place],
                    justify="left" if place in self.text_columns else "right",
                    overflow="fold",
                )
            for row in self.rows:
                table.add_row(_plain(row[0]), *(_plain(row[place]) for place in places))
            yield table

    def _widths(self) -> list[int]:
        """Width of each column: that of its cells, and of its head's lines up to a limit."""
        widths = []
        for place, head in enumerate(self.heads):
            longest = max(map(cell_len, head.split("\n")))
            cells = (cell_len(str(row[place])) for row in self.rows)
            widths.append(max([1, min(longest, _HEAD) if place else longest, *cells]))
        return widths


def _parts(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Indices of the columns that fit side by side, beside the label, for each table; at least one each."""
    places: list[int] = []
    label = min(widths[0], _LABEL)
    for place in range(1, len(widths)):
        if places and label + _taken([widths[each] for each in (*places, place)]) > room:
            yield places
            places = []
        places.append(place)
    yield places


def _taken(widths: Sequence[int]) -> int:
    """Total width of columns of these widths beside the label, with a space and a line before each, and the edges."""
    return sum(widths) + 2 * len(widths) + 3


def _plain(cell: Cell) -> Text:
    """The cell as text: users' text may look like markup."""
    return cell if isinstance(cell, Text) else Text(cell)
