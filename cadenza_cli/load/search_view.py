"""The view of a running search: a progress bar on stderr, or a line at intervals where stderr is no terminal."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from cadenza_simulator.capacity.search import TrialProgress

_LINE_EVERY_S = 10.0
_WIDE = 100
"""Columns from which a terminal has room for a long bar."""


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
