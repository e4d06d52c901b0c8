"""The threads that work on grammars: a few for masks, which take microseconds, and one each for whatever takes longer.

So what one grammar takes (an output of thousands of tokens to take, a mask of milliseconds) delays the rows with that
grammar, and no others: what is known to be slow has a thread of its own, and where a shared one meets something slow
unawares, another takes its place. llguidance lets the interpreter go meanwhile; the machine's cores are shared. Each
shared thread has lexers of its own (`GrammarState.lexer`), as a lexer serves one at a time. Compilations have threads
of their own, see `compile_turns`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

from executor_svc.structured.compile_turns import with_large_stack, yield_to_others
from executor_svc.structured.compiler import Compiled
from executor_svc.structured.matcher import GrammarState

SLOW_S = 0.002
"""A sequence whose last work took longer has a thread of its own for the next."""


class MaskWork(Protocol):
    """A part of a state's work."""

    def done(self) -> bool:
        """Whether it is done."""
        ...

    def result(self, timeout: float | None = None) -> None:
        """Wait until it is done, or raise TimeoutError after so many seconds."""
        ...


class _Batch:
    """What a shared thread is given at once."""

    def __init__(self, num_parts: int) -> None:
        self.done: Future[None] = Future()
        self._num_left, self._lock = num_parts, threading.Lock()

    def end_one(self) -> None:
        """Note that a part of it is done."""
        with self._lock:
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            self.done.set_result(None)


class _BatchPart:
    """The part of one state in a batch. Who waits for it waits for the batch: a future for each takes too long."""

    __slots__ = ("_is_done", "batch", "state", "tokens")

    def __init__(self, state: GrammarState, tokens: Sequence[int]) -> None:
        self.state, self.tokens = state, tokens
        self.batch: _Batch
        self._is_done = False

    def end(self) -> None:
        """Note that it is done."""
        self._is_done = True
        self.batch.end_one()

    def done(self) -> bool:
        return self._is_done

    def result(self, timeout: float | None = None) -> None:
        if not self._is_done:
            self.batch.done.result(timeout)


class MaskThreads:
    """Runs the work of states, a part at a time for each."""

    def __init__(self, num_slots: int, num_shared: int = 1) -> None:
        """num_slots: how many sequences may have slow work at once. Work of a freed slot goes on for a while.

        num_shared: threads that many sequences share, one for each lexer of a grammar.
        """
        self._own = ThreadPoolExecutor(2 * num_slots, thread_name_prefix="grammars")
        # A walk compiles its grammar again.
        self._walking = ThreadPoolExecutor(2 * num_slots, thread_name_prefix="walks", initializer=yield_to_others)
        # A thread inherits its starter's priority. This one must not inherit the priority of a compiling thread.
        self._shared = [_SharedThread(deque()) for _ in range(num_shared)]
        self._queues: dict[Compiled, deque[_BatchPart]] = {}
        """What waits for lexers that others have."""
        self._queues_lock = threading.Lock()

    def run(
        self,
        state: GrammarState,
        work: Callable[[], None],
        *,
        is_slow: bool = False,
        after: Future[Compiled] | None = None,
    ) -> Future[None]:
        """Run a part of a state's work, and `walk_alone` if that is due; the result is never an exception.

        after: what the work begins with, which is not waited for by a thread.
        """
        self.relieve()
        done: Future[None] = Future()
        if after is None or after.done():
            self._start(state, work, done, is_slow or _is_slow(after))
        else:
            after.add_done_callback(
                lambda compiled: self._share(
                    state, lambda: self._start(state, work, done, is_slow or _is_slow(compiled))
                )
            )
        return done

    def take_each(self, taken: Sequence[tuple[GrammarState, Sequence[int]]]) -> list[MaskWork]:
        """Let each state take its next tokens, as `run` of `GrammarState.take`, for less: there is one future for all
        that a shared thread does.
        """
        self.relieve()
        found = list[MaskWork]()
        batches: list[list[_BatchPart]] = [[] for _ in self._shared]
        for state, tokens in taken:
            if state.last_s > SLOW_S:
                done: Future[None] = Future()
                self._start(state, partial(state.take, tokens), done, is_slow=True)
                found.append(done)
            else:
                part = _BatchPart(state, tokens)
                batches[state.lexer % len(batches)].append(part)
                found.append(part)
        for shared, parts in zip(self._shared, batches, strict=True):
            if parts:
                batch = _Batch(len(parts))
                for each in parts:
                    each.batch = batch
                shared.parts.extend([partial(self._take_quickly, each) for each in parts])
                shared.go_on()
        return found

    def relieve(self) -> None:
        """Let another thread go on with what waits for a shared one, if that has met something slow.

        Called where work is given or waited for, by a thread whose priority the new one may have.
        """
        for index, shared in enumerate(self._shared):
            if shared.parts and time.perf_counter() - shared.began > SLOW_S:
                shared.is_replaced = True
                self._shared[index] = _SharedThread(shared.parts)

    def _share(self, state: GrammarState, part: Callable[[], None]) -> None:
        shared = self._shared[state.lexer % len(self._shared)]
        shared.parts.append(part)
        shared.go_on()

    def _start(self, state: GrammarState, work: Callable[[], None], done: Future[None], is_slow: bool) -> None:
        if is_slow or state.last_s > SLOW_S:
            with_large_stack(lambda: self._own.submit(self._run, state, work, done))
        else:
            self._share(state, partial(self._run_quickly, state, work, done))

    def _run_quickly(self, state: GrammarState, work: Callable[[], None], done: Future[None]) -> None:
        if state.lexer_is_busy:
            # A slow sequence with the same grammar has it: those with other grammars do not wait for that.
            with_large_stack(lambda: self._own.submit(self._run, state, work, done))
        else:
            self._run(state, work, done)

    def _take_quickly(self, part: _BatchPart) -> None:
        lexer = part.state.compiled
        if lexer is None or not lexer.lock.locked():
            self._take(part)
            return
        # As in `_run_quickly`, but on one thread for all that wait for a lexer: many would fight for it.
        with self._queues_lock:
            if (queue := self._queues.get(lexer)) is not None:
                queue.append(part)
                return
            self._queues[lexer] = deque([part])
        with_large_stack(lambda: self._own.submit(self._serve, lexer))

    def _serve(self, lexer: Compiled) -> None:
        """Do what waits for a lexer, until nothing does."""
        while True:
            with self._queues_lock:
                queue = self._queues[lexer]
                if not queue:
                    del self._queues[lexer]
                    return
                part = queue.popleft()
            self._take(part)

    def _take(self, part: _BatchPart) -> None:
        part.state.take(part.tokens)
        if part.state.must_walk:
            walked: Future[None] = Future()
            walked.add_done_callback(lambda _: part.end())
            with_large_stack(lambda: self._walking.submit(self._walk, part.state, walked))
        else:
            part.end()

    def _run(self, state: GrammarState, work: Callable[[], None], done: Future[None]) -> None:
        work()
        if state.must_walk:
            with_large_stack(lambda: self._walking.submit(self._walk, state, done))
        else:
            done.set_result(None)

    def _walk(self, state: GrammarState, done: Future[None]) -> None:
        state.walk_alone()
        done.set_result(None)


class _SharedThread:
    """A thread for parts of many states, until another replaces it."""

    def __init__(self, parts: deque[Callable[[], None]]) -> None:
        self.parts = parts
        self.is_replaced = False
        self.began = math.inf
        """When its present part began, by `time.perf_counter`; infinity: it has none."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        with_large_stack(self.go_on)

    def go_on(self) -> None:
        """Look for parts."""
        self._thread.submit(self._run)

    def _run(self) -> None:
        while not self.is_replaced:
            try:
                part = self.parts.popleft()
            except IndexError:
                return
            self.began = time.perf_counter()
            part()
            self.began = math.inf


def _is_slow(compiled: Future[Compiled] | None) -> bool:
    """Whether the first mask of a grammar takes long; it is compiled, or has failed."""
    if compiled is None or compiled.cancelled() or compiled.exception() is not None:
        return False
    return compiled.result().first_s > SLOW_S
