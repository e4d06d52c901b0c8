"""Wakes Generate streams that have new output a few at a time, so that they do not hold up the next step.

A step has output for every stream, and a message costs the event loop some 40 us (decision 0024). If all streams wrote
at once, the plan of the next step would wait behind a thousand messages. With turns the event loop looks at results
after every few of them, and when messages take longer than steps, a stream sends the tokens of several steps at once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

AT_ONCE = 4
"""Streams that are woken in one turn of the event loop."""


class StreamTurns:
    """The streams with new output, in the order in which they got it."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[asyncio.Event, None] = OrderedDict()
        self._is_running = False

    def request(self, wake: asyncio.Event) -> None:
        """Set `wake` when its turn comes; an event that waits already keeps its place."""
        self._waiting[wake] = None
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_soon(self._wake_some)

    def withdraw(self, wake: asyncio.Event) -> None:
        """Forget an event."""
        self._waiting.pop(wake, None)

    def _wake_some(self) -> None:
        for _ in range(min(AT_ONCE, len(self._waiting))):
            wake, _ = self._waiting.popitem(last=False)
            wake.set()
        self._is_running = bool(self._waiting)
        if self._is_running:
            asyncio.get_running_loop().call_soon(self._wake_some)
