"""Draws a schedule for the terminal: rows are sequences, columns are steps."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from cadenza.steps.cells import Cell
from cadenza_cli.demo.schedule import Schedule

_MAX_LABEL = 26
_TICK = 10


@dataclass(frozen=True, slots=True)
class _Look:
    glyph: str
    ascii: str
    style: str
    meaning: str


_LOOKS = {
    Cell.PREFILL: _Look("█", "#", "bold cyan", "prefill"),
    Cell.DECODE: _Look("▪", "o", "green", "decode"),
    Cell.SEVERAL: _Look("▮", "O", "bold green", "decode, several tokens"),
    Cell.UNUSED: _Look("×", "x", "red", "computed past its end"),
    Cell.IDLE: _Look("-", "-", "yellow", "not computed"),
    Cell.WAITING: _Look("·", ".", "bright_black", "waiting"),
    Cell.ABSENT: _Look(" ", " ", "", ""),
}


def draw_schedule(schedule: Schedule, *, width: int, ascii_only: bool = False) -> Text:
    """The picture in at most `width` terminal cells below its headline; each line ends with a newline.

    If there are more steps than columns, each column shows several steps, and the headline states it. `ascii_only` is
    for terminals that cannot show the block glyphs.
    """
    if not schedule.rows:
        return Text("no steps were recorded\n")
    label_width = min(_MAX_LABEL, max(cell_len(row.label) for row in schedule.rows), max(8, width // 3))
    counts = [f"{row.num_prompt_tokens}+{row.num_output_tokens}" for row in schedule.rows]
    count_width = max(len(count) for count in counts)
    columns = max(1, width - label_width - count_width - 4)
    per_column = -(-len(schedule.step_ids) // columns)
    picture = Text(no_wrap=True, overflow="ignore")
    picture.append(_headline(schedule, per_column) + "\n", style="bold")
    for row, count in zip(schedule.rows, counts, strict=True):
        picture.append(_fit(row.label, label_width, ascii_only) + "  ")
        for cell in _bin(row.cells, per_column):
            look = _LOOKS[cell]
            picture.append(look.ascii if ascii_only else look.glyph, style=look.style)
        picture.append(f"  {count:>{count_width}}\n", style="bright_black")
    rule = "-" if ascii_only else "─"
    num_columns = -(-len(schedule.step_ids) // per_column)
    picture.append(
        _fit("in the batch", label_width, ascii_only) + "  " + _occupancy(schedule, per_column) + "\n", style="magenta"
    )
    picture.append(
        _fit("step", label_width, ascii_only) + "  " + _axis(num_columns, per_column, rule) + "\n", style="bright_black"
    )
    picture.append(_legend(schedule, width, ascii_only))
    return picture


def _headline(schedule: Schedule, per_column: int) -> str:
    steps = len(schedule.step_ids)
    text = f"{len(schedule.rows)} sequences over {steps} step{'s' if steps != 1 else ''}"
    return text if per_column == 1 else f"{text}; one column is {per_column} steps"


def _bin(cells: list[Cell], per_column: int) -> list[Cell]:
    return [max(cells[start : start + per_column]) for start in range(0, len(cells), per_column)]


def _occupancy(schedule: Schedule, per_column: int) -> str:
    """Mean number of sequences computed per step in each column, as one digit; + is ten or more."""
    digits = []
    for start in range(0, len(schedule.occupancy), per_column):
        part = schedule.occupancy[start : start + per_column]
        mean = round(sum(part) / len(part))
        digits.append(str(mean) if mean < 10 else "+")
    return "".join(digits)


def _axis(num_columns: int, per_column: int, rule: str) -> str:
    """Step numbers, counted from 1, at every tenth column; the first digit is above the step's column."""
    text = ""
    for column in range(0, num_columns, _TICK):
        number = str(column * per_column + 1)
        room = min(_TICK, num_columns - column)
        text += (number + rule * _TICK)[:room] if len(number) <= room else rule * room
    return text


def _legend(schedule: Schedule, width: int, ascii_only: bool) -> Text:
    seen = {cell for row in schedule.rows for cell in row.cells}
    entries: list[Text] = []
    for cell, look in _LOOKS.items():
        if cell is Cell.ABSENT or (cell in (Cell.SEVERAL, Cell.UNUSED, Cell.IDLE) and cell not in seen):
            continue
        glyph = look.ascii if ascii_only else look.glyph
        entries.append(Text.assemble((glyph, look.style), f" {look.meaning}"))
    entries.append(Text("tokens: prompt+output"))
    legend = Text()
    room = width
    for entry in entries:
        if legend and entry.cell_len + 3 > room:
            legend.append("\n")
            room = width
        elif legend:
            legend.append("   ")
            room -= 3
        legend.append(entry)
        room -= entry.cell_len
    return legend.append("\n")


def _fit(label: str, width: int, ascii_only: bool) -> str:
    """Exactly `width` terminal cells; wide characters count two, and a wide character at the edge becomes a space."""
    if cell_len(label) > width:
        label = set_cell_size(label, width - 1).rstrip() + ("~" if ascii_only else "…")
    return set_cell_size(label, width)
