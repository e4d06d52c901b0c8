"""Time for the engine: one clock, given at construction, so that a simulation or a test runs it on virtual time."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol


class ScheduledCall(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """Drop the call; safe after it ran."""


class Clock(ABC):
    """A monotonic clock, the wall time, and timers. Sleeps and timeouts follow from the timers."""

    @abstractmethod
    def monotonic_ns(self) -> int:
        """Nanoseconds since an arbitrary moment; never goes back."""

    @abstractmethod
    def wall_time_ns(self) -> int:
        """Nanoseconds since 1970-01-01 UTC."""

    @abstractmethod
    def call_later(self, delay_s: float, callback: Callable[[], object]) -> ScheduledCall:
        """Call `callback` on the event loop after `delay_s` seconds; at or below 0, as soon as the loop is free."""

    def monotonic(self) -> float:
        """`monotonic_ns` in seconds."""
        return self.monotonic_ns() / 1e9

    async def sleep(self, delay_s: float) -> None:
        """Wait for `delay_s` seconds."""
        over = asyncio.Event()
        timer = self.call_later(delay_s, over.set)
        try:
            await over.wait()
        finally:
            timer.cancel()

    @asynccontextmanager
    async def timeout(self, delay_s: float | None) -> AsyncIterator[None]:
        """Raises TimeoutError from a body that runs for longer than `delay_s` seconds; None: no limit."""
        async with asyncio.timeout(None) as scope:
            # A moment in the past: the scope expires as soon as this clock's timer runs, whatever the loop's time is.
            timer = None if delay_s is None else self.call_later(delay_s, lambda: scope.reschedule(0.0))
            try:
                yield
            finally:
                if timer is not None:
                    timer.cancel()


class SystemClock(Clock):
    """The operating system's clocks and the running event loop's timers."""

    def monotonic_ns(self) -> int:
        """As time.monotonic_ns."""
        return time.monotonic_ns()

    def wall_time_ns(self) -> int:
        """As time.time_ns."""
        return time.time_ns()

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> ScheduledCall:
        """As the running loop's call_later."""
        return asyncio.get_running_loop().call_later(delay_s, callback)
