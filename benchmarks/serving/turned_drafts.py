"""What do drafts cost where none is right? Steps that may have drafts and steps that may not take turns in one stream.

`python -m benchmarks.serving.turned_drafts OPTIONS` is the scheduler service in which every other `TURN` plans neither
choose a number of drafts nor learn of any. Both kinds of steps have the same memory, threads and sequences, and follow
each other within a fraction of a second: other jobs of the machine meet both alike.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

from cadenza_common.plan.result import StepResult
from scheduler_svc.core import scheduler
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.steps import drafted_results, planning
from scheduler_svc.core.steps.budget import StepBudget

TIMES = "BENCHMARK_TURNED_DRAFTS"
"""Of the environment: the file that the times are written to when the service ends."""
TURN = 32
"""Steps with drafts, then as many without."""
_LEFT_OUT = 4
"""First steps of a turn: plans in flight are the other turn's, and a source reads tokens that it has missed."""


def has_drafts(step_id: int) -> bool:
    """Return whether a step is in a turn that may have drafts."""
    return step_id // TURN % 2 == 1


class Turns:
    """The core's two calls about drafts, in every other turn; notes when the results of plain decodes came."""

    def __init__(self) -> None:
        self._plan, self._observe = planning.plan_drafts, drafted_results.observe_drafts
        self._steps: array[int] = array("q")
        patch.object(planning, "plan_drafts", self._plan_drafts).start()
        patch.object(scheduler, "observe_drafts", self._observe_drafts).start()

    def _plan_drafts(self, lane: Lane, step: PlannedStep, budget: StepBudget) -> None:
        if has_drafts(step.plan.step_id):
            self._plan(lane, step, budget)

    def _observe_drafts(self, lane: Lane, step: PlannedStep, result: StepResult) -> None:
        if has_drafts(step.plan.step_id):
            self._observe(lane, step, result)
        is_plain = step.total_tokens == len(step.decode_slots)
        num_decodes = len(step.decode_slots) if is_plain else 0
        self._steps.extend((result.step_id, num_decodes, time.perf_counter_ns(), sum(result.num_drafts)))

    def save(self, path: Path) -> None:
        """Write the steps for `read_turns`."""
        path.write_text(json.dumps(self._steps.tolist()))


def read_turns(path: Path, batch: int) -> tuple[list[float], int]:
    """Return what drafts cost in each turn that has a turn without on both sides, as a share of a step's time; and
    the number of drafts.

    batch: steps of so many decoding sequences count.
    """
    flat = json.loads(path.read_text())
    steps = list(zip(*(flat[column::4] for column in range(4)), strict=True))
    turns: dict[int, list[int]] = {}
    for (before, _, then, _), (step_id, num_decodes, now, _) in pairwise(steps):
        if step_id == before + 1 and num_decodes == batch and step_id % TURN >= _LEFT_OUT:
            turns.setdefault(step_id // TURN, []).append(now - then)
    means = {turn: statistics.fmean(times) for turn, times in turns.items() if len(times) == TURN - _LEFT_OUT}
    costs = [
        means[turn] / statistics.fmean((means[turn - 1], means[turn + 1])) - 1
        for turn in means
        if has_drafts(turn * TURN) and turn - 1 in means and turn + 1 in means
    ]
    return costs, sum(flat[3::4])


def main(arguments: Sequence[str]) -> None:
    """Serve until a signal."""
    from scheduler_svc import __main__ as service

    turns = Turns()
    leave = os._exit

    def save_and_leave(code: int) -> None:
        turns.save(Path(os.environ[TIMES]))
        leave(code)

    os._exit = save_and_leave  # type: ignore[assignment]
    sys.exit(service.main())


if __name__ == "__main__":
    main(sys.argv[1:])
