"""A view of a load test that shows nothing, and lets a test wait for a number of requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from cadenza_loadtest.driving.driver import Progress
from cadenza_simulator.capacity.search import TrialProgress


class SilentView:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.trials: list[TrialProgress] = []
        self._num_ended = 0
        self._outputs = asyncio.Event()

    @contextlib.contextmanager
    def running(self, what: str, total: int | None) -> Iterator[None]:
        self._num_ended = 0
        yield

    def on_progress(self, now: Progress) -> None:
        self._num_ended = now.num_ended
        self._outputs.set()

    def on_trial(self, now: TrialProgress) -> None:
        self.trials.append(now)

    def say(self, text: str) -> None:
        self.said.append(text)

    async def has_ended(self, count: int) -> None:
        """So many requests of the present run have ended."""
        while self._num_ended < count:
            self._outputs.clear()
            await self._outputs.wait()
