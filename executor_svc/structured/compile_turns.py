"""Whose grammar is compiled next, and how many at once.

A compilation may take seconds and much memory, and cannot be interrupted. So a few run at once, and those who ask take
turns: one may have as many running as there are free threads (half of them if it is alone, then a third each, as in the
scheduler's queue: the dynamic thresholds of Choudhury and Hahne, IEEE/ACM Trans. Networking 6(2), 1998). The flood of
one delays its own.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from cadenza_common.grammar.compiling import STACK_BYTES
from cadenza_common.grammar.tenant_turns import TenantTurns

NUM_THREADS = 4
"""Compilations at once, each of which has passed the scheduler's door: 2 GiB and 10 s at most there."""
_MORE_NICE = 10
"""Niceness of these threads beyond the process's: what runs the model and makes masks goes first."""
_STACK_SIZE = threading.Lock()
"""Held while the size of new threads' stacks, which is the process's, is another."""


@dataclass(eq=False, slots=True)
class Turn:
    """A compilation that waits for its turn."""

    work: Callable[[], None]
    asked_by: set[int] = field(default_factory=set)
    has_begun: bool = False


class CompileTurns:
    """Runs compilations on threads of its own; for use by several threads."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="compiling", initializer=yield_to_others)
        self._lock = threading.Lock()
        self._waiting: TenantTurns[int, Turn] = TenantTurns()
        self._running: Counter[int] = Counter()

    def run(self, turn: Turn, asked_by: int) -> None:
        """Run a compilation when the first of its callers has a turn: this one, or another that asked for the same."""
        with self._lock:
            if turn.has_begun or asked_by in turn.asked_by:
                return
            turn.asked_by.add(asked_by)
            self._waiting.add(asked_by, turn)
        self._go_on()

    def _go_on(self) -> None:
        """Start what may start."""
        while True:
            with self._lock:
                free = self._num_threads - self._running.total()
                owner = next((each for each in self._waiting.tenants() if self._running[each] < free), None)
                if owner is None:
                    return
                turn = self._waiting.pop_of(owner)
                for other in turn.asked_by - {owner}:
                    self._waiting.remove(other, turn)
                turn.has_begun = True
                self._running[owner] += 1
            with_large_stack(lambda turn=turn, owner=owner: self._pool.submit(self._work, turn, owner))  # type: ignore[misc]

    def _work(self, turn: Turn, owner: int) -> None:
        try:
            turn.work()
        finally:
            with self._lock:
                self._running -= Counter([owner])
            self._go_on()


def with_large_stack(start: Callable[[], object]) -> None:
    """Start a thread whose stack holds what the scheduler's door has compiled on a smaller one.

    A pool starts its threads as they are needed. Other threads that start meanwhile get as much address space.
    """
    with _STACK_SIZE:
        former = threading.stack_size(16 * STACK_BYTES)
        try:
            start()
        finally:
            threading.stack_size(former)


def yield_to_others() -> None:
    """Lower this thread's priority, where the system has one for each thread."""
    with suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _MORE_NICE)
