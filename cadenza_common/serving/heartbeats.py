"""Heartbeats of the plan stream: how often both services send them, and when a peer that sends none counts as lost."""

from __future__ import annotations

import asyncio
import time

HEARTBEAT_S = 0.5
"""Interval of heartbeats."""
SILENCE_S = 2.0
"""A peer without messages for this long is lost."""
CHECK_S = 0.25
"""Interval at which silence is checked."""


class PeerSilence:
    """Measures how long a peer has sent nothing while this process was able to receive it.

    A process that was suspended (SIGSTOP, a laptop's lid) or busy has not read what arrived meanwhile. So the time
    between two checks counts as at most twice its interval, and the messages are read before the next one.
    """

    def __init__(self, limit_s: float, now: float | None = None) -> None:
        """limit_s: the silence after which the peer is lost. now: seconds on a monotonic clock, by default time's."""
        self.limit_s = limit_s
        self.silent_s = 0.0
        self._check_s = min(CHECK_S, limit_s / 4)
        self._last_check = time.monotonic() if now is None else now

    def heard(self) -> None:
        """Record a message of the peer."""
        self.silent_s = 0.0

    def is_lost(self, now: float) -> bool:
        """Whether the peer has been silent for as long as the limit; to be called every CHECK_S seconds."""
        self.silent_s += min(now - self._last_check, 2 * self._check_s)
        self._last_check = now
        return self.silent_s >= self.limit_s

    async def wait_until_lost(self) -> None:
        """Return when the peer has been silent for as long as the limit."""
        while True:
            await asyncio.sleep(self._check_s)
            if self.is_lost(time.monotonic()):
                return
