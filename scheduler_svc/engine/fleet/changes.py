"""Waiting for a condition that is checked after each change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class ChangeSignal:
    """Wakes those that wait for a condition; a change costs nothing while nobody waits."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Event] = set()

    def notify(self) -> None:
        """Something has changed."""
        for changed in self._waiting:
            changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        changed = asyncio.Event()
        self._waiting.add(changed)
        try:
            while not holds():
                await changed.wait()
                changed.clear()
        finally:
            self._waiting.discard(changed)
