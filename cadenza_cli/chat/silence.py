"""Says what is wrong while an answer does not go on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from cadenza.client import Client
from cadenza.errors import CadenzaError

QUIET_S = 2.0
"""An answer that brings nothing for so long is looked into."""


class SilenceWatch:
    """While open, asks the server after each long silence whether an executor is away, and reports it once."""

    def __init__(self, client: Client, report: Callable[[str], None], quiet_s: float = QUIET_S) -> None:
        self._client, self._report, self._quiet_s = client, report, quiet_s
        self._heard = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="silence", daemon=True)

    def __enter__(self) -> SilenceWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._heard.set()  # the thread is not waited for: its question may take long

    def heard(self) -> None:
        """Something of the answer has come."""
        self._heard.set()

    def _watch(self) -> None:
        reported = False
        while not self._closed.is_set():
            if self._heard.wait(self._quiet_s):
                self._heard.clear()
                reported = False
            elif not reported:
                reason = self._reason()
                reported = bool(reason)
                if reason and not (self._closed.is_set() or self._heard.is_set()):
                    self._report(reason)

    def _reason(self) -> str:
        """What is away; empty: nothing is, and the answer is waited for."""
        try:
            executors = self._client.server_info().executors
        except CadenzaError:
            return "the server does not answer; the answer goes on when it is back"
        if executors and not any(each.connected for each in executors):
            return "the executor restarts; the answer goes on when it is back"
        return ""
