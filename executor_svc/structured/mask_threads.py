"""The threads that work on grammars: one for masks, which take microseconds, and one each for whatever takes longer.

So what one grammar takes (its compilation, an output of thousands of tokens to take, a mask of milliseconds) delays the
rows with that grammar, and no others. llguidance lets the interpreter go meanwhile; the machine's cores are shared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from cadenza.grammar.compiling import STACK_BYTES
from executor_svc.structured.matcher import GrammarState

SLOW_S = 0.002
"""A sequence whose last work took longer has a thread of its own for the next."""


class MaskThreads:
    """Runs the work of states, a part at a time for each."""

    def __init__(self, num_slots: int) -> None:
        """num_slots: sequences that may have slow work at the same time; those of free slots go on for a while."""
        self._quick = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._own = ThreadPoolExecutor(2 * num_slots, thread_name_prefix="grammars")

    def run(self, state: GrammarState, work: Callable[[], None], *, is_slow: bool = False) -> Future[None]:
        """Run a part of a state's work, and `walk_alone` if that is due; the result is never an exception."""
        done: Future[None] = Future()
        if is_slow or state.last_s > SLOW_S:
            _with_large_stack(lambda: self._own.submit(self._run, state, work, done))
        else:
            _with_large_stack(lambda: self._quick.submit(self._run_quickly, state, work, done))
        return done

    def _run_quickly(self, state: GrammarState, work: Callable[[], None], done: Future[None]) -> None:
        if state.lexer_is_busy:
            # A slow sequence with the same grammar has it: those with other grammars do not wait for that.
            _with_large_stack(lambda: self._own.submit(self._run, state, work, done))
        else:
            self._run(state, work, done)

    def _run(self, state: GrammarState, work: Callable[[], None], done: Future[None]) -> None:
        work()
        if state.must_walk:
            _with_large_stack(lambda: self._own.submit(self._walk, state, done))
        else:
            done.set_result(None)

    def _walk(self, state: GrammarState, done: Future[None]) -> None:
        state.walk_alone()
        done.set_result(None)


def _with_large_stack(start: Callable[[], object]) -> None:
    """Start a thread whose stack holds what the scheduler's door has compiled on a smaller one.

    A pool starts its threads as they are needed. Other threads that start meanwhile get as much address space.
    """
    former = threading.stack_size(16 * STACK_BYTES)
    try:
        start()
    finally:
        threading.stack_size(former)
