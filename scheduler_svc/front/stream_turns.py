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
        self._num_woken = 0
        """Streams that were woken since the last turn, or in it."""
        self._has_turn = False

    def request(self, wake: asyncio.Event) -> None:
        """Set `wake` when its turn comes: at once if few others do; an event that waits already keeps its place."""
        if self._waiting or self._num_woken >= AT_ONCE:
            self._waiting[wake] = None
        elif not wake.is_set():
            wake.set()
            self._num_woken += 1
        if not self._has_turn:
            self._has_turn = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def withdraw(self, wake: asyncio.Event) -> None:
        """Forget an event."""
        self._waiting.pop(wake, None)

    def _take_turn(self) -> None:
        self._num_woken = min(AT_ONCE, len(self._waiting))
        for _ in range(self._num_woken):
            wake, _ = self._waiting.popitem(last=False)
            wake.set()
        self._has_turn = self._num_woken > 0
        if self._has_turn:
            asyncio.get_running_loop().call_soon(self._take_turn)
