"""The signals that stop a service: SIGTERM lets it finish its work, SIGINT or a second signal ends it at once."""

from __future__ import annotations

import asyncio
import signal

DRAIN_TIMEOUT_S = 25.0
"""Default of --drain-timeout-s. Kubernetes sends SIGKILL 30 s after SIGTERM by default, and the end takes a second."""


class StopSignals:
    """The stop signals of a service on an event loop."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        """Set by the first signal."""
        self.at_once = asyncio.Event()
        """Set by SIGINT, as Ctrl-C sends it, and by the second signal."""

    def install(self) -> None:
        """Handle SIGINT and SIGTERM on the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.on_signal, number)

    def on_signal(self, number: int) -> None:
        """Take a signal."""
        if number == signal.SIGINT or self.stop.is_set():
            self.at_once.set()
        self.stop.set()
