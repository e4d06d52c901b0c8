"""What has arrived for one HTTP request: deltas of all its prompts, taken in one go."""

from __future__ import annotations

import asyncio

from cadenza.errors import CadenzaError, QueueFullError
from cadenza.outputs import RequestOutput

MAX_DELTAS = 65_536
"""Deltas that wait for a client that does not read; a request with more of them ends."""
Taken = list[tuple[int, RequestOutput]]
"""(index of the prompt, delta)"""


class Inbox:
    """Filled by the session, emptied by the handler of the HTTP request.

    All that one message of the scheduler brings is put in before the handler runs, so that it writes to its socket
    once.
    """

    __slots__ = ("_deltas", "_num_open", "_wake", "error")

    def __init__(self, num_open: int) -> None:
        """num_open: prompts that have not ended."""
        self._deltas: Taken = []
        self._num_open = num_open
        self._wake = asyncio.Event()
        self.error: CadenzaError | None = None

    def put(self, index: int, delta: RequestOutput) -> None:
        """Add the delta of a prompt."""
        if len(self._deltas) >= MAX_DELTAS:
            self.fail(QueueFullError("the client reads too slowly"))
            return
        self._deltas.append((index, delta))
        self._wake.set()

    def end(self) -> None:
        """One more prompt has ended."""
        self._num_open -= 1
        self._wake.set()

    def fail(self, error: CadenzaError) -> None:
        """A prompt has failed, and with it the HTTP request."""
        if self.error is None:
            self.error = error
        self._wake.set()

    async def take(self) -> Taken | None:
        """What has arrived, as soon as there is something; None: nothing more comes.

        Raises the CadenzaError of a prompt that failed, after what arrived before.
        """
        while not self._deltas:
            if self.error is not None:
                raise self.error
            if self._num_open <= 0:
                return None
            self._wake.clear()
            await self._wake.wait()
        taken, self._deltas = self._deltas, []
        return taken

    async def wait(self) -> None:
        """Wait until all prompts have ended; raises the CadenzaError of one that failed."""
        while await self.take() is not None:
            pass
