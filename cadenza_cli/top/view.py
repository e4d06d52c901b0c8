"""The views of `cadenza top`: a first screen in users' words, and one with the server's internals."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, auto

from rich.text import Text

from cadenza_cli.text import number, printable
from cadenza_cli.top.details import adapter_parts, detail_rows
from cadenza_cli.top.figures import Lost, Percentiles, ServerFigures
from cadenza_cli.top.lanes import duration, lane_rows, share, tokens_per_step
from cadenza_cli.top.rows import LineGroup, elide, fit, named, sparkline
from cadenza_cli.top.tenants import fault_parts, tenant_rows
from cadenza_cli.wrapping import wrap

_HISTORY = 60
"""Most intervals that the bars show."""
_NAME_CELLS = 17
_VALUE_CELLS = 11
_MAXIMUM_CELLS = 17
_WIDTH_WITH_MAXIMUM = 70
_ERROR_LINES = 6
_TOTALS_KEEP = 84
"""Rows from this on are more important than the lines of executors."""
_FAULTS_KEEP = 83.5
_ADAPTERS_KEEP = 83.4


class Screen(Enum):
    """The screens."""

    OVERVIEW = auto()
    DETAILS = auto()
    TENANTS = auto()
    """Tenants and faults."""


@dataclass(frozen=True, slots=True)
class _Figure:
    """A line of the first screen."""

    name: str
    keep: float
    shown: Callable[[float | None], str]
    value: Callable[[ServerFigures], float | None]  # over the window
    bar: Callable[[ServerFigures], float | None]  # over the newest interval
    top: float | None = None  # the highest bar; None: the largest value
    optional: bool = False  # not shown without a value


class TopView:
    """Draws observations of a server, with bars of earlier intervals."""

    def __init__(self, target: str, *, ascii_only: bool = False, now: Callable[[], float] = time.time) -> None:
        """`now`: the time of day in seconds since 1970."""
        self._target = target
        self._ascii_only = ascii_only
        self._now = now
        self._seen: deque[ServerFigures | Lost] = deque(maxlen=_HISTORY)

    def add(self, observation: ServerFigures | Lost) -> None:
        """Take one more interval."""
        self._seen.append(observation)

    def screen(self, width: int, height: int, *, page: Screen, foot: str) -> Text:
        """Exactly `height` lines of at most `width` cells; `foot` is the last."""
        lines = self._lines(width, height - 1, page)
        lines += [Text()] * (height - 1 - len(lines))
        return _joined([*lines, Text(foot, style="reverse")])

    def picture(self, width: int, height: int, *, page: Screen) -> Text:
        """What `screen` shows, as a text that stays in the terminal."""
        return _joined(self._lines(width, height - 1, page))

    def whole(self, width: int) -> Text:
        """Everything, one below the other, for a pipe."""
        latest = self._seen[-1]
        lines = self._lines(width, 1000, Screen.OVERVIEW)
        if isinstance(latest, ServerFigures):
            for rows in (detail_rows, tenant_rows):
                lines += [Text(), *fit(rows(latest, width, 1000, ascii_only=self._ascii_only), 1000)]
        return _joined(lines)

    def _lines(self, width: int, height: int, page: Screen) -> list[Text]:
        if not self._seen:
            connecting = elide(f"connecting to {self._target}", width, ascii_only=self._ascii_only)
            return fit([LineGroup([Text(connecting)], 100)], height)
        latest = self._seen[-1]
        rows = [LineGroup([self._head(latest, width)], 100)]
        if isinstance(latest, Lost):
            rows += self._lost_rows(latest, width)
        elif page is Screen.DETAILS:
            rows += detail_rows(latest, width, height - 1, ascii_only=self._ascii_only)
        elif page is Screen.TENANTS:
            rows += tenant_rows(latest, width, height - 1, ascii_only=self._ascii_only)
        else:
            rows += self._about_rows(latest, width)
        if isinstance(latest, Lost) or page is Screen.OVERVIEW:
            for group in _FIGURES:
                figures = [self._figure_row(figure, width) for figure in group if self._has(figure)]
                rows += [LineGroup([Text()], 1), *figures] if figures else []
        if isinstance(latest, ServerFigures) and page is Screen.OVERVIEW:
            free = height - sum(len(row.lines) for row in rows if row.keep >= _TOTALS_KEEP)
            lanes = lane_rows(latest.executors, width, free, ascii_only=self._ascii_only)
            rows += [LineGroup([Text()], 1), *lanes] if lanes else []
        return fit(rows, height)

    def _head(self, latest: ServerFigures | Lost, width: int) -> Text:
        state = ""
        if isinstance(latest, Lost):
            state = f"lost for {latest.lost_s:.0f} s"
        elif latest.info.draining:
            state = "draining"
        target = elide(self._target, width - len("cadenza top    ") - len(state), ascii_only=self._ascii_only)
        head = Text.assemble(("cadenza top", "bold"), f"  {target}")
        return head.append(f"  {state}", style="bold red") if state else head

    def _lost_rows(self, lost: Lost, width: int) -> list[LineGroup]:
        error = wrap(printable(str(lost.error)), width).splitlines()[:_ERROR_LINES]
        return [
            LineGroup([Text(line, style="red") for line in error], 99),
            LineGroup([Text("Retrying.", style="red")], 98),
        ]

    def _about_rows(self, snapshot: ServerFigures, width: int) -> list[LineGroup]:
        executors = snapshot.executors
        devices = list(dict.fromkeys(printable(each.info.device) for each in executors))
        if len(executors) > 1:
            devices.append(f"{len(executors)} executors")
        rows = [
            self._about("model", [printable(snapshot.model)], 90, width),
            self._about("device", devices, 80, width),
            self._about("up since", [self._up_since(snapshot.info.uptime_s)], 70, width),
        ]
        num_away = sum(not each.info.connected for each in executors)
        if num_away:
            keep = 95 if len(executors) == 1 else 82  # of several, each has its state in its own line
            rows.append(self._about("away", [f"{num_away} of {len(executors)} executors"], keep, width))
        adapters = adapter_parts(snapshot.info)
        if adapters:
            rows.append(self._about("adapters", adapters, _ADAPTERS_KEEP, width))
        if snapshot.info.faults:
            rows.append(self._about("faults", fault_parts(snapshot.info.faults), _FAULTS_KEEP, width))
        return rows

    def _about(self, name: str, parts: list[str], keep: float, width: int) -> LineGroup:
        lines = named(name, parts, name_cells=_NAME_CELLS, width=width, ascii_only=self._ascii_only)
        return LineGroup(lines, keep)

    def _up_since(self, uptime_s: float) -> str:
        now = datetime.fromtimestamp(self._now())
        start = now - timedelta(seconds=uptime_s)
        shown = f"{start:%H:%M}" if start.date() == now.date() else f"{start:%Y-%m-%d %H:%M}"
        return f"{shown} ({timedelta(seconds=int(uptime_s))})"

    def _has(self, figure: _Figure) -> bool:
        """Whether to show it: an optional one is shown if an interval has a value."""
        seen = [each for each in self._seen if isinstance(each, ServerFigures)]
        return not figure.optional or any(figure.value(each) is not None for each in seen)

    def _figure_row(self, figure: _Figure, width: int) -> LineGroup:
        """The figure's value over the window, and a bar for each interval."""
        latest = self._seen[-1]
        value = figure.value(latest) if isinstance(latest, ServerFigures) else None
        line = Text.assemble((f"{figure.name:{_NAME_CELLS}}", "cyan"), f"{figure.shown(value):<{_VALUE_CELLS}}")
        bars = [figure.bar(each) if isinstance(each, ServerFigures) else None for each in self._seen]
        known = [each for each in bars if each is not None]
        room = width - _NAME_CELLS - _VALUE_CELLS - (_MAXIMUM_CELLS if width >= _WIDTH_WITH_MAXIMUM else 0)
        if len(bars) > 1 and known and room > 0:
            most = max(known)
            line.append(sparkline(bars[-room:], top=figure.top or most, ascii_only=self._ascii_only), style="green")
            if width >= _WIDTH_WITH_MAXIMUM and most and figure.top is None:
                line.append(f"  max {figure.shown(most)}", style="bright_black")
        line.rstrip()
        return LineGroup([line], figure.keep)


def _joined(lines: list[Text]) -> Text:
    """The lines as one text, of which a terminal narrower than any sensible one cuts lines and wraps none."""
    text = Text("\n", no_wrap=True, overflow="crop").join(lines)
    text.no_wrap, text.overflow = True, "crop"
    return text


def _p50(of: Percentiles | None) -> float | None:
    return None if of is None else of.p50


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _running(snapshot: ServerFigures) -> float:
    return snapshot.info.load.num_running


def _waiting(snapshot: ServerFigures) -> float:
    return snapshot.info.load.num_waiting


def _kv_use(snapshot: ServerFigures) -> float:
    return snapshot.kv_use


def _hit_rate(snapshot: ServerFigures) -> float | None:
    return snapshot.prefix_hit_rate


_FIGURES: tuple[tuple[_Figure, ...], ...] = (
    (
        _Figure("running", 89, _count, _running, _running),
        _Figure("waiting", 88, _count, _waiting, _waiting),
    ),
    (
        _Figure(
            "prompt tokens/s", 86, number, lambda s: s.prompt_tokens_per_s, lambda s: s.interval_prompt_tokens_per_s
        ),
        _Figure(
            "output tokens/s", 87, number, lambda s: s.output_tokens_per_s, lambda s: s.interval_output_tokens_per_s
        ),
        _Figure("TTFT p50", 85, duration, lambda s: _p50(s.ttft_s), lambda s: _p50(s.interval_ttft_s)),
    ),
    (
        _Figure("KV used", 84, share, _kv_use, _kv_use, top=1.0),
        _Figure("prefix hit rate", 75, share, _hit_rate, _hit_rate, top=1.0),
    ),
    (
        _Figure(
            "tokens a step",
            74,
            tokens_per_step,
            lambda s: s.tokens_per_step,
            lambda s: s.interval_tokens_per_step,
            optional=True,
        ),
        _Figure(
            "drafts accepted",
            73,
            share,
            lambda s: s.acceptance,
            lambda s: s.interval_acceptance,
            top=1.0,
            optional=True,
        ),
    ),
)

"""The groups of figures; a blank line comes before each if there is room."""
