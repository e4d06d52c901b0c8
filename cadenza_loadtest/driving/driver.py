"""The driver: sends a schedule to a target, each request at its time, and measures the responses.

In an open loop the server cannot delay a request: each request is a task of its own from the moment when it is due, and
its clock starts then (no coordinated omission: Gil Tene, "How NOT to Measure Latency",
https://www.infoq.com/presentations/latency-response-time/).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cadenza_loadtest.driving.live import CANCELLED, SKIPPED, TIMEOUT, Recorder, RequestInFlight
from cadenza_loadtest.driving.pacing import DueUnit, PreparedUnits, units
from cadenza_loadtest.driving.target import Clock, Target
from cadenza_loadtest.driving.timer import Timer
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.requests import RequestShape

_PROGRESS_S = 0.2
_STARTS_AT_ONCE = 16
"""Number of late requests that are started before the event loop runs them."""


class PromptMaker(Protocol):
    """cadenza_loadtest.workloads.prompts.Prompts."""

    def token_ids(self, shape: RequestShape, history: Sequence[int] = ()) -> list[int]:
        """The prompt as token ids, after the session's `history`."""

    def text(self, shape: RequestShape, history_text: str = "") -> str:
        """The prompt as text, after the session's `history_text`."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run."""

    elapsed_s: float
    num_started: int
    num_ended: int
    """Including failed requests."""
    num_failed: int
    num_output_tokens: int
    """Of the requests that have ended."""


async def drive(
    schedule: Iterable[tuple[float, RequestShape]],
    target: Target,
    prompts: PromptMaker,
    *,
    concurrency: int | None = None,
    timeout_s: float | None = None,
    duration_s: float | None = None,
    text_prompts: bool = False,
    keep_gaps: bool = True,
    on_start: Callable[[float], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_failed: Callable[[str, str], None] | None = None,
    on_cancelled: Callable[[], None] | None = None,
    clock: Clock = time.perf_counter,
) -> RequestColumns:
    """Send `schedule` to a started target and return the outcome of each request; times are from the start.

    `schedule`: (seconds since the start, request) in the order of time, with a session's turns one after the other; it
    is read lazily. Open loop: each request starts at its time, independently of the others. With `concurrency`, a
    closed loop: that many users each take the next request or session when their last one has ended; it is due when it
    is taken. A session's later turn is due when the previous answer is complete and its think time has passed; if that
    answer failed, the later turns are rows with the error SKIPPED, due at that moment and never sent.

    `timeout_s`: a request that has not ended this long after it was due is aborted with the error TIMEOUT.
    `duration_s`: requests due later are left out. `text_prompts`: send prompts as text; prompts given as text are
    always sent so. `on_start` is called when everything is ready, with the clock reading that is 0 in the result.
    `on_progress` is called five times a second and at the end, `on_failed` with the code and message of each request
    that fails. On cancellation the driver aborts the requests in flight; then, with `on_cancelled`, it calls that and
    returns the rows so far (aborted requests with the error CANCELLED, none for requests not yet due), otherwise the
    cancellation propagates.

    Raises what the schedule or the prompts raise (LoadTestError), after aborting the requests in flight.
    """
    timer = Timer(clock)
    driver = _Driver(target, prompts, timeout_s, duration_s, text_prompts, keep_gaps, clock, timer, on_failed)
    prepared = PreparedUnits(units(schedule), driver.prompt)
    prepared.fill()
    with present_objects_left_out(), timer.set():
        driver.start_s = clock()
        if on_start is not None:
            on_start(driver.start_s)
        try:
            async with _reporting(driver.progress, on_progress), asyncio.TaskGroup() as group:
                if concurrency is None:
                    await driver.open_loop(prepared, group)
                else:
                    for _ in range(concurrency):
                        group.create_task(driver.user(prepared))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        except asyncio.CancelledError:
            if on_cancelled is None:
                raise
            undo_cancellation()
            on_cancelled()
    return driver.recorder.columns(driver.start_s)


@dataclass(slots=True)
class _Driver:
    target: Target
    prompts: PromptMaker
    timeout_s: float | None
    duration_s: float | None
    text_prompts: bool
    keep_gaps: bool
    clock: Clock
    timer: Timer
    on_failed: Callable[[str, str], None] | None
    start_s: float = 0.0
    recorder: Recorder = field(default_factory=Recorder)
    num_started: int = 0
    num_ended: int = 0
    num_failed: int = 0
    num_output_tokens: int = 0

    async def open_loop(self, prepared: PreparedUnits, group: asyncio.TaskGroup) -> None:
        """The pacing task: starts a task for each request when the request is due."""
        while (unit := prepared.take()) is not None:
            due_s = self.start_s + unit.due_s
            if self._is_over(due_s):
                return
            if due_s > self.clock():
                await self.timer.wait_until(due_s)
            elif self.num_started % _STARTS_AT_ONCE == 0:
                await asyncio.sleep(0)
            group.create_task(self._run(unit, due_s))
            self.num_started += 1

    async def user(self, prepared: PreparedUnits) -> None:
        """One user of a closed loop."""
        while not self._is_over(self.clock()) and (unit := prepared.take()) is not None:
            self.num_started += 1
            await self._run(unit, self.clock())

    def prompt(self, shape: RequestShape, history: list[int] | str = "") -> list[int] | str:
        """A request's prompt, after the `history` of its session."""
        if self.text_prompts or shape.prompt_text:
            return self.prompts.text(shape, history if isinstance(history, str) else "")
        return self.prompts.token_ids(shape, history if isinstance(history, list) else ())

    def progress(self) -> Progress:
        """The progress so far."""
        elapsed_s = self.clock() - self.start_s
        return Progress(elapsed_s, self.num_started, self.num_ended, self.num_failed, self.num_output_tokens)

    async def _run(self, unit: DueUnit, due_s: float) -> None:
        """Run a request, or a session turn by turn."""
        prompt, later = unit.prompt, unit.shapes[1:]
        live = await self._send(unit.shapes[0], prompt, due_s, keep_output=bool(later))
        for place, shape in enumerate(later):
            ended_s = live.last_s if live.num_output_tokens else self.clock()
            if live.error:
                for skipped in later[place:]:
                    self._end(RequestInFlight(skipped, self.clock(), skipped.num_prompt_tokens, error=SKIPPED))
                return
            due_s = ended_s + shape.think_s
            if self._is_over(due_s):
                return
            prompt = self.prompt(shape, _history(prompt, live))
            await self.timer.wait_until(due_s)
            self.num_started += 1
            live = await self._send(shape, prompt, due_s, keep_output=place < len(later) - 1)

    async def _send(
        self, shape: RequestShape, prompt: list[int] | str, due_s: float, *, keep_output: bool
    ) -> RequestInFlight:
        num_prompt_tokens = len(prompt) if isinstance(prompt, list) else shape.num_prompt_tokens
        live = RequestInFlight(shape, due_s, num_prompt_tokens, self.keep_gaps, keep_output)
        try:
            left_s = None if self.timeout_s is None else due_s + self.timeout_s - self.clock()
            async with asyncio.timeout(left_s):
                await self.target.run(shape, prompt, live)
        except TimeoutError:  # targets raise none of their own
            live.failed(TIMEOUT)
        except asyncio.CancelledError:
            live.failed(CANCELLED)
            raise
        finally:
            self._end(live)
        return live

    def _end(self, live: RequestInFlight) -> None:
        self.recorder.add(live)
        self.num_ended += live.error != SKIPPED
        self.num_output_tokens += live.num_output_tokens
        if live.error not in ("", SKIPPED):
            self.num_failed += 1
            if self.on_failed is not None:
                self.on_failed(live.error, live.message)

    def _is_over(self, due_s: float) -> bool:
        return self.duration_s is not None and due_s - self.start_s > self.duration_s


def undo_cancellation() -> None:
    """Let the current task continue although it was cancelled."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


def _history(prompt: list[int] | str, live: RequestInFlight) -> list[int] | str:
    """The start of a session's next prompt: this turn's prompt and its answer.

    If the server does not send the answer's token ids, as many ids of the prompt stand in for them: the lengths are
    right then, but only the prompt part can be found in a prefix cache.
    """
    if isinstance(prompt, str):
        return prompt + "".join(live.output_text)
    missing = live.num_output_tokens // live.shape.num_samples if not live.output_ids else 0
    repeats = missing // max(1, len(prompt)) + 1
    return prompt + (live.output_ids or (prompt * repeats)[:missing])


@contextlib.asynccontextmanager
async def _reporting(
    progress: Callable[[], Progress], on_progress: Callable[[Progress], None] | None
) -> AsyncIterator[None]:
    if on_progress is None:
        yield
        return
    report = on_progress

    async def tick() -> None:
        while True:
            report(progress())
            await asyncio.sleep(_PROGRESS_S)

    ticking = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        report(progress())


@contextlib.contextmanager
def present_objects_left_out() -> Iterator[None]:
    """Exclude existing objects from garbage collections: scanning them takes tens of milliseconds.

    What the process had excluded before its first run, or an outer run has, stays so afterwards.
    """
    global _num_within
    stays = _num_within > 0 or _anything_left_out()
    gc.collect()
    gc.freeze()
    _num_within += 1
    try:
        yield
    finally:
        _num_within -= 1
        if not stays:
            gc.unfreeze()


_num_within = 0
"""Runs under way, one within the other."""


@functools.cache
def _anything_left_out() -> bool:
    """Asked once in a process: the collector counts by walking over all of them, 0.4 s for some millions."""
    return gc.get_freeze_count() > 0
