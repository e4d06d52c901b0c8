"""Blocking work whose end nobody waits for when the process stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


async def in_daemon_thread(work: Callable[[], _T], name: str) -> _T:
    """What `work` returns or raises. A cancelled caller leaves the thread alone, which ends by itself."""
    found: Future[_T] = Future()

    def run() -> None:
        found.set_running_or_notify_cancel()
        try:
            found.set_result(work())
        except BaseException as exc:
            found.set_exception(exc)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(found)
