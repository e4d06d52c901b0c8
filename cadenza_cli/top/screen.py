"""`cadenza top` in a terminal: draws over the whole screen, and takes keys."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

from rich.console import Console
from rich.live import Live

from cadenza_cli.keyboard import Keyboard, has_keyboard
from cadenza_cli.top.figures import Lost, ServerFigures
from cadenza_cli.top.view import Screen, TopView


class TopScreen:
    """Shows each observation until `q` or Ctrl-C; the last picture stays in the terminal."""

    def __init__(self, console: Console, view: TopView) -> None:
        self._console = console
        self._view = view
        self._page = Screen.OVERVIEW
        self._quit = asyncio.Event()
        self._live = Live(console=console, screen=True, auto_refresh=False)

    def show(self, observation: ServerFigures | Lost) -> None:
        """Draw one more interval."""
        self._view.add(observation)
        self._draw()

    async def run(self, observe: Callable[[], Awaitable[None]]) -> None:
        """Show what `observe` passes to `show`, until it raises or `q` is typed."""
        loop = asyncio.get_running_loop()
        try:
            with self._live, Keyboard(self._on_key):
                loop.add_signal_handler(signal.SIGWINCH, self._draw)
                self._draw()
                observing = asyncio.ensure_future(observe())
                quitting = asyncio.ensure_future(self._quit.wait())
                try:
                    await asyncio.wait((observing, quitting), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    loop.remove_signal_handler(signal.SIGWINCH)
                    for task in (observing, quitting):
                        task.cancel()
                    results = await asyncio.gather(observing, quitting, return_exceptions=True)
        finally:
            width, height = self._console.size
            picture = self._view.picture(width, height, page=self._page)
            self._console.print(picture, no_wrap=True, overflow="crop")
        if isinstance(results[0], Exception):
            raise results[0]

    def _on_key(self, key: str) -> None:
        if key in "qQ":
            self._quit.set()
        elif key in "dD":
            self._turn_to(Screen.DETAILS)
        elif key in "tT":
            self._turn_to(Screen.TENANTS)

    def _turn_to(self, page: Screen) -> None:
        """Show a page, or the first one again if it is shown."""
        self._page = Screen.OVERVIEW if self._page is page else page
        self._draw()

    def _draw(self) -> None:
        width, height = self._console.size
        self._live.update(self._view.screen(width, height, page=self._page, foot=self._foot()), refresh=True)

    def _foot(self) -> str:
        if not has_keyboard():
            return "Ctrl-C quits"
        details = "overview" if self._page is Screen.DETAILS else "details"
        tenants = "overview" if self._page is Screen.TENANTS else "tenants, faults"
        return f"q quit  d {details}  t {tenants}"
