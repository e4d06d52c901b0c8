"""A scheduler whose planning is timed: `python -m benchmarks.common.plan_watch [options of the scheduler]`.

At SIGUSR1 it appends what it has measured since the last time to the file that CADENZA_BENCH_PLANS names, as a line of
JSON, and begins anew: plans, CPU time of planning and of applying results on the loop's thread, in nanoseconds.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from scheduler_svc.core.scheduler import Scheduler

FILE = "CADENZA_BENCH_PLANS"


class PlanTimes:
    """Counts since the last report."""

    def __init__(self) -> None:
        self.plans = self.plan_ns = self.apply_ns = 0

    def report(self) -> str:
        """The counts as a line; they begin anew."""
        line = json.dumps({"plans": self.plans, "plan_ns": self.plan_ns, "apply_ns": self.apply_ns})
        self.plans = self.plan_ns = self.apply_ns = 0
        return line


def watch(times: PlanTimes) -> None:
    """Time all schedulers of this process from now on."""
    plan_step, apply_result, clock = Scheduler.plan_step, Scheduler.apply_result, time.thread_time_ns

    def timed_plan(*arguments: Any, **named: Any) -> Any:
        begin = clock()
        plan = plan_step(*arguments, **named)
        times.plan_ns += clock() - begin
        times.plans += plan is not None
        return plan

    def timed_apply(*arguments: Any, **named: Any) -> Any:
        begin = clock()
        applied = apply_result(*arguments, **named)
        times.apply_ns += clock() - begin
        return applied

    Scheduler.plan_step = timed_plan  # type: ignore[method-assign]
    Scheduler.apply_result = timed_apply  # type: ignore[method-assign]


def main() -> None:
    """Run the scheduler's service with these times."""
    times, file = PlanTimes(), Path(os.environ[FILE])

    def report(_number: int, _frame: FrameType | None) -> None:
        with file.open("a") as lines:
            lines.write(times.report() + "\n")

    signal.signal(signal.SIGUSR1, report)
    watch(times)
    sys.argv[0] = "scheduler_svc"
    runpy.run_module("scheduler_svc", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
