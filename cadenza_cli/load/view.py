"""The view of a running load test: a progress bar on stderr, and a line for each run that has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from cadenza_loadtest.driving.driver import Progress


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
