"""One background event loop for all blocking clients of a process (grpc.aio wants one loop, grpc#42357).

gRPC and fork: if a process has used gRPC and its forked child uses it, too, both processes abort.

They share the kernel's poll set, and gRPC aborts on events that it does not know (observed with grpcio 1.76).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")

_CANCEL_TIMEOUT_S = 5.0
_LOOK_S = 0.5  # for a signal that came just before the wait began: nothing wakes the thread for it
_user: int | None = None  # the process that began to use gRPC: this one, or the parent that it was forked from


class _PollerNoise(logging.Filter):
    """Drops one harmless message of asyncio's log, which is very frequent with two event loops in one process.

    grpc.aio wakes every loop for every event; all but the first find nothing left to read (grpc#42357).
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not (
            isinstance(error, BlockingIOError) and "PollerCompletionQueue._handle_events" in record.getMessage()
        )


_POLLER_NOISE = _PollerNoise()  # one object: a logger adds the same filter only once


class LoopThread:
    """An event loop on a daemon thread."""

    _shared: ClassVar[LoopThread | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._finishing: set[asyncio.Task[None]] = set()  # the loop itself holds only weak references to tasks
        self._thread = threading.Thread(target=self._run_loop, name="cadenza-client", daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> LoopThread:
        """The process's loop thread; made on first use, and again in a forked child, where threads do not exist any
        more."""
        with cls._lock:
            if cls._shared is None or not cls._shared.lives:
                cls._shared = cls()
                logging.getLogger("asyncio").addFilter(_POLLER_NOISE)
            return cls._shared

    @property
    def lives(self) -> bool:
        """Whether its thread runs in this process; not in a forked child of the process that made it."""
        return self._pid == os.getpid()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait; otherwise as `call`."""
        try:
            return self.call(lambda: work)
        finally:
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Make a coroutine on the loop, run it there, and wait; no interruption can leave the coroutine unstarted.

        An exception in the waiting thread, such as KeyboardInterrupt, cancels the work, waits until it has ended (at
        most 5 seconds) and propagates. Raises RuntimeError if waiting would never end: on the loop itself, and in a
        forked child.
        """
        if not self.lives:
            raise forked(self._pid)
        if threading.current_thread() is self._thread:
            raise RuntimeError("the blocking client was called on its own event loop: use AsyncClient")
        # A bare lock, free when the work has ended: KeyboardInterrupt may come at any bytecode, and within a Condition,
        # as futures and events have one, it can become a RuntimeError or leave a lock behind.
        ended = threading.Lock()
        ended.acquire()
        # The loop alone holds the task. Where its last reference goes, callbacks of asyncio's weak sets run, and Python
        # discards an exception in one: a KeyboardInterrupt would be lost.
        tasks: list[asyncio.Task[T]] = []
        outcomes: list[Callable[[], T]] = []

        def start() -> None:
            task = self.loop.create_task(make())
            tasks.append(task)
            task.add_done_callback(end)

        def end(task: asyncio.Task[T]) -> None:
            tasks.clear()
            outcomes.append(_outcome(task))
            ended.release()

        def cancel() -> None:
            if tasks:
                tasks[0].cancel()
            elif not outcomes:  # the interruption came before `start` was scheduled, because callbacks run in order
                ended.release()

        try:
            self.loop.call_soon_threadsafe(start)
            while not ended.acquire(timeout=_LOOK_S):
                pass
            return outcomes[0]()
        except BaseException:
            if not outcomes:
                self.loop.call_soon_threadsafe(cancel)
                ended.acquire(timeout=_CANCEL_TIMEOUT_S)
            raise

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run clean-up and wait; if waiting is impossible (garbage collection on the loop itself), only start it."""
        if threading.current_thread() is self._thread:
            task = self.loop.create_task(work)
            self._finishing.add(task)
            task.add_done_callback(self._finishing.discard)
        else:
            self.run(work)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


def _outcome(task: asyncio.Task[T]) -> Callable[[], T]:
    """A call that returns the result of an ended task, or raises its exception; it does not hold the task."""
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is None:
        result = task.result()
        return lambda: result

    def fail() -> T:
        raise error

    return fail


def claim_grpc() -> None:
    """Record that this process uses gRPC; raises RuntimeError if it was forked from a process that used it."""
    global _user
    if _user is None:
        _user = os.getpid()
    elif _user != os.getpid():
        raise forked(_user)


def forked(parent: int) -> RuntimeError:
    """The error for a forked child that uses its parent's gRPC."""
    return RuntimeError(
        f"this process was forked from process {parent} after that had begun to use Cadenza's client, and gRPC does "
        'not outlive a fork: make clients after the fork only, or start processes with the method "spawn"'
    )
