"""A line for each executor of a server with several, for the first screen of `cadenza top`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from cadenza_cli.text import number, printable
from cadenza_cli.top.figures import ExecutorFigures
from cadenza_cli.top.rows import LineGroup, elide

_KEEP = 83.0
"""Below the totals, above what a user can do without: the device, the start time, the prefix hit rate of all."""
_ADDRESS_CELLS = 15
"""Columns are left out until an address has so many cells."""
_GAP = "  "


@dataclass(frozen=True, slots=True)
class _Column:
    """A column; its width changes only for values that are wider than `widest`."""

    name: str
    widest: str
    keep: int  # the column with the smallest is left out first
    shown: Callable[[ExecutorFigures], str]
    optional: bool = False  # left out if it has no value for any executor


def share(value: float | None) -> str:
    """A share of 1 in percent."""
    if value is None:
        return "-"
    return f"{value:.1%}" if 0 < value < 0.0995 else f"{value:.0%}"


def duration(value_s: float | None) -> str:
    """A time with its unit."""
    if value_s is None:
        return "-"
    return f"{number(1e3 * value_s)} ms" if value_s < 0.9995 else f"{number(value_s)} s"


def tokens_per_step(value: float | None) -> str:
    """Tokens of a sequence in a step, to two places."""
    return "-" if value is None else f"{value:.2f}"


def lane_rows(executors: Sequence[ExecutorFigures], width: int, num_lines: int, *, ascii_only: bool) -> list[LineGroup]:
    """A heading, and a line for each executor, in at most `num_lines` lines; nothing for a single executor."""
    if len(executors) < 2 or num_lines < 2:
        return []
    num_shown = len(executors) if len(executors) < num_lines else num_lines - 2
    shown = executors[:num_shown]
    columns = _fitting(shown, width)
    room = max(1, width - sum(len(column[0]) + len(_GAP) for column in columns))
    names = [elide(printable(each), room, ascii_only=ascii_only) for each in ("executor", *_targets(shown))]
    name_cells = max(map(cell_len, names))
    lines = [
        Text(_GAP.join([name + " " * (name_cells - cell_len(name)), *values]).rstrip())
        for name, *values in zip(names, *columns, strict=True)
    ]
    lines[0].stylize("cyan")
    for line, figures in zip(lines[1:], shown, strict=True):
        line.stylize("" if figures.info.state == "serving" else "red")
    if num_shown < len(executors):
        lines.append(Text(elide(f"{len(executors) - num_shown} more executors", width, ascii_only=ascii_only)))
    return [LineGroup([line], _KEEP - place / 1000) for place, line in enumerate(lines)]


def _fitting(executors: Sequence[ExecutorFigures], width: int) -> list[list[str]]:
    """The columns for which there is room, the most important ones first; each with its heading."""
    chosen: dict[str, list[str]] = {}
    room = width - _ADDRESS_CELLS
    for column in sorted(_COLUMNS, key=lambda each: -each.keep):
        cells = _cells(column, executors)
        if column.optional and set(map(str.strip, cells[1:])) == {"-"}:
            continue
        room -= len(cells[0]) + len(_GAP)
        if room < 0:
            break
        chosen[column.name] = cells
    return [chosen[column.name] for column in _COLUMNS if column.name in chosen]


def _cells(column: _Column, executors: Sequence[ExecutorFigures]) -> list[str]:
    """A heading and values of equal width, right-aligned unless they are words."""
    cells = [column.name, *map(column.shown, executors)]
    width = max(map(len, (column.widest, *cells)))
    return [f"{each:<{width}}" if column.name == "state" else f"{each:>{width}}" for each in cells]


def _targets(executors: Sequence[ExecutorFigures]) -> list[str]:
    return [each.info.target for each in executors]


def _kv_use(figures: ExecutorFigures) -> str:
    info = figures.info
    return share(info.num_used_device_blocks / info.num_device_blocks) if info.num_device_blocks else "-"


def _step_time(figures: ExecutorFigures) -> str:
    times = figures.times_s.get("total")
    return duration(times.p50 if times else None)


_COLUMNS = (
    _Column("state", "draining", 9, lambda each: each.info.state),
    _Column("running", "1,024", 8, lambda each: f"{each.info.num_running:,}"),
    _Column("waiting", "1,024", 5, lambda each: f"{each.info.num_waiting:,}"),
    _Column("KV", "9.9%", 6, _kv_use),
    _Column("tokens/s", "100,000", 7, lambda each: number(each.output_tokens_per_s)),
    _Column("step", "12.3 ms", 4, _step_time),
    _Column("hits", "9.9%", 3, lambda each: share(each.prefix_hit_rate)),
    _Column("tokens/step", "1.23", 2, lambda each: tokens_per_step(each.tokens_per_step), optional=True),
    _Column("accepted", "100%", 1, lambda each: share(each.acceptance), optional=True),
)
