"""Watches the event loop of a service: `python -m tests.helpers.machine.loop_watch FILE MODULE [options]`.

It runs the service's module on asyncio's own loop, whose callbacks are Python methods, and measures each: its CPU time
on the loop's thread, its duration, and how late a timer is that is due every 2 ms. At SIGUSR1 it appends what it has
measured since the last time to FILE, as a line of JSON, and begins anew.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import signal
import sys
import time
from asyncio.events import Handle
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

BOUNDS_MS = (0.1, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000)
"""Upper bounds of the histogram's buckets; the last bucket has none."""
_TIMER_S = 0.002


class LoopWatch:
    """Durations of callbacks, in milliseconds."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was measured."""
        self.histogram = [0] * (len(BOUNDS_MS) + 1)
        self.cpu_ms = self.wall_ms = self.late_ms = 0.0
        self.longest = ""

    def add(self, cpu_ms: float, wall_ms: float, callback: Any) -> None:
        """Count a callback."""
        self.histogram[sum(cpu_ms > bound for bound in BOUNDS_MS)] += 1
        self.wall_ms = max(self.wall_ms, wall_ms)
        if cpu_ms > self.cpu_ms:
            self.cpu_ms, self.longest = cpu_ms, name_of(callback)

    def to_json(self) -> str:
        """What was measured, as one line: the histogram is of CPU time."""
        return json.dumps(
            {
                "histogram": self.histogram, "cpu_ms": self.cpu_ms, "wall_ms": self.wall_ms, "late_ms": self.late_ms,
                "longest": self.longest,
            }
        )  # fmt: skip


def name_of(callback: Any) -> str:
    """The name of a callback; of a task's step, that of its coroutine."""
    task = getattr(callback, "__self__", None)
    named = task.get_coro() if isinstance(task, asyncio.Task) else callback
    return str(getattr(named, "__qualname__", repr(named)))


def watch(loop_watch: LoopWatch) -> Callable[[], None]:
    """Measure every callback of all loops of this process from now on; returns what ends it."""
    run = Handle._run

    def timed(handle: Handle) -> None:
        callback = handle._callback  # type: ignore[attr-defined]
        cpu, wall = time.thread_time(), time.perf_counter()
        run(handle)
        loop_watch.add(1e3 * (time.thread_time() - cpu), 1e3 * (time.perf_counter() - wall), callback)

    def end() -> None:
        Handle._run = run  # type: ignore[method-assign]

    Handle._run = timed  # type: ignore[method-assign, assignment]
    return end


async def _time_lateness(loop_watch: LoopWatch) -> None:
    while True:
        due = time.perf_counter() + _TIMER_S
        await asyncio.sleep(_TIMER_S)
        loop_watch.late_ms = max(loop_watch.late_ms, 1e3 * (time.perf_counter() - due))


def main(file: Path, module: str, arguments: list[str]) -> None:
    """Run the module as a program, watched."""
    loop_watch = LoopWatch()

    def report(_number: int, _frame: FrameType | None) -> None:
        with file.open("a") as lines:
            lines.write(loop_watch.to_json() + "\n")
        loop_watch.reset()

    signal.signal(signal.SIGUSR1, report)

    async def watched(serving: Coroutine[Any, Any, Any]) -> Any:
        timing = asyncio.create_task(_time_lateness(loop_watch))
        try:
            return await serving
        finally:
            timing.cancel()

    import uvloop

    def run(serving: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(watched(serving))

    uvloop.run = run  # type: ignore[assignment]
    watch(loop_watch)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
