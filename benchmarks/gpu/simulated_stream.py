"""A stream of a device that computes nothing but takes a stated time for it; events are done when that is past."""

from __future__ import annotations

import time


class SimulatedStream:
    """Work of stated times, one after another. The clock is the machine's own: who waits for it really waits."""

    def __init__(self) -> None:
        self._busy_until = 0.0

    def run(self, seconds: float) -> None:
        """Enqueue work of so many seconds."""
        self._busy_until = self.end() + seconds

    def end(self) -> float:
        """Return when all work so far ends, by `time.perf_counter`; now, if it has."""
        return max(self._busy_until, time.perf_counter())

    def event(self, **_: object) -> SimulatedEvent:
        """Return a new event, for arguments as of `torch.cuda.Event`."""
        return SimulatedEvent(self)


class SimulatedEvent:
    """As `torch.cuda.Event`, of the stream."""

    def __init__(self, stream: SimulatedStream) -> None:
        self._stream, self._at = stream, 0.0

    def record(self) -> None:
        """As PyTorch's."""
        self._at = self._stream.end()

    def query(self) -> bool:
        """As PyTorch's: whether it is done or was never recorded."""
        return time.perf_counter() >= self._at

    def synchronize(self) -> None:
        """As PyTorch's; other threads run meanwhile."""
        while (left := self._at - time.perf_counter()) > 0:
            time.sleep(left)

    def elapsed_time(self, other: SimulatedEvent) -> float:
        """Return the milliseconds from this event to another."""
        return 1e3 * (other._at - self._at)
