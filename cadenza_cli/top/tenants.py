"""The tenants and the faults of a server, for the third screen of `cadenza top`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from cadenza.info import FaultCount
from cadenza_cli.text import number, printable
from cadenza_cli.top.figures import ServerFigures, TenantFigures
from cadenza_cli.top.rows import LineGroup, elide

_GAP = "  "
_NAME_CELLS = 12
"""Columns are left out until a name has so many cells."""
_RECENT_S = 60.0
"""A fault is red for so long."""
_NUM_SHORT = 2
_UNITS = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))


def tenant_rows(snapshot: ServerFigures, width: int, height: int, *, ascii_only: bool = False) -> list[LineGroup]:
    """A line for each tenant and for each kind of fault, in at most `height` lines; the newest faults first."""
    faults, tenants = _newest_first(snapshot.info.faults), snapshot.tenants
    num_fault_lines = min(len(faults) + 1, max(2, height // 2))
    num_tenant_lines = max(0, height - num_fault_lines - 1)
    lines = _tenant_table(tenants, width, num_tenant_lines, ascii_only=ascii_only)
    return [
        LineGroup([line], 50) for line in (*lines, Text(), *_fault_table(faults, width, num_fault_lines, ascii_only))
    ]


def fault_parts(faults: Sequence[FaultCount]) -> list[str]:
    """The newest kinds of faults in a few words, for the first screen; empty: there were none."""
    newest = _newest_first(faults)
    parts = [f"{_name(each)} {each.count:,} ({age(each.last_age_s)})" for each in newest[:_NUM_SHORT]]
    more = len(newest) - _NUM_SHORT
    return [*parts, f"{more} more kinds"] if more > 1 else [*parts, "1 more kind"] if more == 1 else parts


def age(seconds: float) -> str:
    """How long ago something was, in its largest whole unit."""
    unit_s, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{int(seconds / unit_s)} {unit} ago"


def _tenant_table(tenants: Sequence[TenantFigures], width: int, num_lines: int, *, ascii_only: bool) -> list[Text]:
    if num_lines < 1:
        return []
    if not tenants:
        return [Text(elide("tenants: the server has no tenants file", width, ascii_only=ascii_only))]
    num_shown = len(tenants) if len(tenants) < num_lines else max(0, num_lines - 2)
    shown = tenants[:num_shown]
    rows = [
        (
            printable(each.info.name) or "(all)", f"{each.info.num_running:,}", f"{each.info.num_waiting:,}",
            number(each.output_tokens_per_s), f"{each.info.num_rejected:,}", f"{each.info.num_queued_tokens:,}",
            f"{each.info.weight:g}",
        )
        for each in shown
    ]  # fmt: skip
    names = ("tenant", "running", "waiting", "tokens/s", "refused", "queued tokens", "weight")
    lines = _table(names, rows, width, ascii_only=ascii_only)
    for line, each in zip(lines[1:], shown, strict=True):
        line.stylize("red" if each.num_rejected_in_window else "")
    if num_shown < len(tenants):
        text = f"{len(tenants) - num_shown} more tenants: see --json"
        lines.append(Text(elide(text, width, ascii_only=ascii_only)))
    return lines


def _fault_table(faults: Sequence[FaultCount], width: int, num_lines: int, ascii_only: bool) -> list[Text]:
    if not faults:
        return [Text(elide("no faults since the start", width, ascii_only=ascii_only))]
    shown = faults[: num_lines - 1]
    rows = [(_name(each), f"{each.count:,}", age(each.last_age_s), printable(each.last_executor)) for each in shown]
    lines = _table(("fault", "count", "last", "executor"), rows, width, ascii_only=ascii_only)
    for line, each in zip(lines[1:], shown, strict=True):
        line.stylize("red" if each.last_age_s < _RECENT_S else "")
    return lines


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, ascii_only: bool) -> list[Text]:
    """Lines with a heading: the first column is elided, the last ones are left out where there is no room."""
    columns = list(zip(names, *rows, strict=True))
    cells = [max(map(cell_len, column)) for column in columns]
    num_shown = len(columns)
    while num_shown > 1 and min(_NAME_CELLS, cells[0]) + sum(cells[1:num_shown]) + len(_GAP) * (num_shown - 1) > width:
        num_shown -= 1
    room = max(1, width - sum(cells[1:num_shown]) - len(_GAP) * (num_shown - 1))
    first = [elide(each, room, ascii_only=ascii_only) for each in columns[0]]
    first_cells = max(map(cell_len, first))
    lines = []
    for place, name in enumerate(first):
        rest = [f"{columns[index][place]:>{cells[index]}}" for index in range(1, num_shown)]
        lines.append(Text(_GAP.join([name + " " * (first_cells - cell_len(name)), *rest]).rstrip()))
    lines[0].stylize("cyan")
    return lines


def _newest_first(faults: Sequence[FaultCount]) -> list[FaultCount]:
    return sorted(faults, key=lambda each: each.last_age_s)


def _name(fault: FaultCount) -> str:
    return fault.kind.replace("_", " ")
