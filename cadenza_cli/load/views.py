"""The views of a running load test and of a running search: a progress bar on stderr.

That of a load test has a line for each run that has ended; that of a search lines at intervals where stderr is no
terminal.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from cadenza_loadtest.driving.driver import Progress

if TYPE_CHECKING:
    from cadenza_simulator.capacity.search import TrialProgress

_LINE_EVERY_S = 10.0
_WIDE = 100
"""Columns from which a terminal has room for a long bar."""


class LoadView:
    """The view of one load test; with `quiet` only the lines."""

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False, emoji=False, markup=False)
        self._quiet = quiet or not self._console.is_terminal
        self._bar: Bar | None = None
        self._task = TaskID(0)

    @contextlib.contextmanager
    def running(self, what: str, total: int | None) -> Iterator[None]:
        """Show a progress bar for a run of `total` requests (None: not known); it is removed at the end."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
        )
        with Bar(*columns, console=self._console, transient=True, disable=self._quiet, refresh_per_second=5) as bar:
            self._bar = bar
            self._task = bar.add_task(what, total=total, facts="")
            try:
                yield
            finally:
                self._bar = None

    def on_progress(self, now: Progress) -> None:
        """Update the bar."""
        if self._bar is None:
            return
        failed = f", {now.num_failed} failed" if now.num_failed else ""
        facts = f"{now.num_started - now.num_ended} in flight{failed}, {now.num_output_tokens} tokens"
        self._bar.update(self._task, completed=now.num_ended, facts=facts)

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text)


class SearchView:
    """Shows what a search tries, and its messages."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True, highlight=False, emoji=False, markup=False)
        self._clock = clock
        self._line_at = clock() + _LINE_EVERY_S
        self._bar: Bar | None = None
        self._task = TaskID(0)

    @contextlib.contextmanager
    def searching(self) -> Iterator[None]:
        """Show a progress bar on a terminal; it is removed at the end."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24 if self._console.width >= _WIDE else 8),
            TextColumn("{task.fields[facts]}", markup=False),
        )
        shown = self._console.is_terminal
        with Bar(*columns, console=self._console, transient=True, disable=not shown, refresh_per_second=5) as bar:
            self._bar = bar if shown else None
            self._task = bar.add_task("search", total=1.0, facts="", visible=False)
            try:
                yield
            finally:
                self._bar = None

    def on_trial(self, now: TrialProgress) -> None:
        """Update the bar; without one, print a line if the last one was a while ago."""
        if self._bar is not None:
            done = now.elapsed_s / max(1e-9, now.elapsed_s + now.left_s)
            self._bar.update(self._task, description=_tried(now), completed=done, facts=_facts(now), visible=True)
        elif self._clock() >= self._line_at:
            self.say(f"{_tried(now)}: {now.done:.0%} done, {_facts(now)}")

    def say(self, text: str) -> None:
        """Print a line."""
        self._line_at = self._clock() + _LINE_EVERY_S
        self._console.print(f"cadenza: {text}", soft_wrap=True)


def _tried(now: TrialProgress) -> str:
    executors = "1 executor" if now.num_executors == 1 else f"{now.num_executors} executors"
    return f"{executors}, {now.rate:.4g} requests/s, trial {now.number} of ~{now.expected}"


def _facts(now: TrialProgress) -> str:
    share = "" if now.share is None else f"{now.share:.1%} in SLO, "
    minutes, seconds = divmod(math.ceil(now.left_s), 60)
    return f"{share}{minutes}:{seconds:02} left"
