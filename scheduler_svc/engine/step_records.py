"""What is recorded of steps: records for watches, figures for metrics, spans for traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from cadenza_common.plan.result import StepResult
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.types import RequestKey
from scheduler_svc.engine.lane_views import step_load
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.step_watch import StepRecorder, StepRecordWatch
from scheduler_svc.engine.tracing.request_traces import NoTraces
from scheduler_svc.metrics.numbers import EngineNumbers


class StepRecords:
    """Passes the events of steps on to all that record them."""

    def __init__(
        self,
        core: Scheduler,
        lives: Mapping[RequestKey, LiveRequest],
        numbers: EngineNumbers,
        traces: NoTraces,
        started_ns: int,
    ) -> None:
        """started_ns: when the engine started; records have times since then."""
        self._core = core
        self._lives = lives
        self._numbers = numbers
        self._traces = traces
        self.recorder = StepRecorder(partial(step_load, core), started_ns)

    def watch(self, *, include_block_tables: bool) -> StepRecordWatch:
        """A watch that yields the records of all steps from now on."""
        return StepRecordWatch(self.recorder.watches, include_block_tables=include_block_tables)

    def on_planned(self, step: PlannedStep, now_ns: int) -> None:
        """A step was planned."""
        self.recorder.on_planned(self._core.lanes, step.plan)
        self._numbers.on_planned(step)
        self._traces.on_planned(step, self._lives, now_ns)

    def on_applied(
        self, step: PlannedStep, result: StepResult, outputs: StepOutputs, now: float
    ) -> Callable[[], None] | None:
        """Count the step; returns the call that records it for watches, with its first tokens."""
        self._numbers.on_applied(step, result, outputs, now)
        self._traces.on_applied(step, result, outputs, self._lives, now)
        return self.recorder.record_later(self._core.lanes[step.plan.executor_id], step, result, outputs, now)

    def on_first_token(self, live: LiveRequest, now_ns: int) -> None:
        """A request has its first token."""
        self.recorder.on_first_token(now_ns - live.times.arrival_ns)
        self._numbers.requests.on_first_token(live.request.spec, live.times, live.counts, live.catches_up)

    def on_finished(self, sequences: list[Sequence]) -> None:
        """Sequences have finished."""
        self.recorder.on_finished(sequences)
        self._numbers.on_finished(sequences)

    def on_session_ended(self, executor_id: int) -> None:
        """Forget what was recorded for the plans in flight."""
        self.recorder.on_session_ended(executor_id)
        self._traces.on_session_ended(executor_id, self._lives.values())
        self._numbers.on_session_ended(executor_id)
