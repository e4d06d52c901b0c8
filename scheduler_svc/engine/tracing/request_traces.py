"""Traces requests while they run, and makes their spans once they have ended. Exists only if traces are sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Protocol

from cadenza_common.plan.result import StepResult
from cadenza_common.telemetry.spans import SpanSink
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.types import RequestKey
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.request_trace import ExecutorIdentity, RequestTrace, TracedStep
from scheduler_svc.engine.tracing.request_spans import request_span
from scheduler_svc.plan_loop.clock import Clock, ScheduledCall
from scheduler_svc.plan_loop.ports import ModelDescription

_MAX_WAITING = 4096
"""Ended requests that wait for their spans; beyond it the oldest are not traced."""
_AT_ONCE = 2
"""Requests whose spans are made in one turn of the event loop: 0.2 ms of CPU time each (measured)."""
_PAUSE_S = 0.002


Lives = Mapping[RequestKey, LiveRequest]


class TracedExecutors(Protocol):
    """What traces need of the executor set."""

    @property
    def model(self) -> ModelDescription:
        """The served model."""

    def identity_of(self, executor_id: int) -> ExecutorIdentity:
        """The process that an executor is, or was in its last session."""


class NoTraces:
    """Traces nothing. Its calls are those of RequestTraces; none is made for each token."""

    def begin(self, live: LiveRequest) -> None:
        """Trace a new request, unless its caller does not record its own span."""

    def on_planned(self, step: PlannedStep, lives: Lives, now_ns: int) -> None:
        """A step was planned."""

    def on_applied(self, step: PlannedStep, result: StepResult, outputs: StepOutputs, lives: Lives, now: float) -> None:
        """A step's result was applied, and its outputs are about to be. `now`: in seconds on the clock."""

    def on_session_ended(self, executor_id: int, lives: Iterable[LiveRequest]) -> None:
        """The plans in flight of an executor are lost."""

    def on_attached(self, live: LiveRequest) -> None:
        """A stream is about to be attached to a request."""

    def on_ended(self, live: LiveRequest) -> None:
        """A request has ended."""

    def stop(self) -> None:
        """Make the spans of all requests that have ended."""


class RequestTraces(NoTraces):
    """The traces of all requests. Hundreds may end with one step; their spans are made a few at a time."""

    def __init__(self, clock: Clock, sink: SpanSink, executors: TracedExecutors) -> None:
        self._clock = clock
        self._sink = sink
        self._executors = executors
        self._ended: deque[LiveRequest] = deque(maxlen=_MAX_WAITING)
        self._timer: ScheduledCall | None = None

    def begin(self, live: LiveRequest) -> None:
        """As in NoTraces."""
        parent = live.request.trace
        if parent is None or parent.sampled:
            live.trace = RequestTrace(parent)

    def on_planned(self, step: PlannedStep, lives: Lives, now_ns: int) -> None:
        """As in NoTraces."""
        executor, step_id = self._executors.identity_of(step.plan.executor_id), step.plan.step_id
        for sequences in (step.joined, step.described):
            for sequence in sequences:
                live = lives.get(sequence.group.key)
                if live is not None and live.trace is not None:
                    live.trace.on_joined(executor, step_id, now_ns)
        for sequence in step.preempted:
            live = lives.get(sequence.group.key)
            if live is not None and live.trace is not None:
                live.trace.on_interrupted("preempted", executor, step_id, now_ns)

    def on_applied(self, step: PlannedStep, result: StepResult, outputs: StepOutputs, lives: Lives, now: float) -> None:
        """As in NoTraces."""
        if step.chunks:
            executor = self._executors.identity_of(step.plan.executor_id)
            planned_ns, applied_ns = int(step.planned_at * 1e9), int(now * 1e9)
            for chunk in step.chunks:
                live = lives.get(chunk.sequence.group.key)
                if live is None or live.trace is None or chunk.sequence.is_beam:
                    continue
                device_ns = result.timings.device_ns
                about = (executor, step.plan.step_id, planned_ns, applied_ns, device_ns, chunk.num_tokens)
                live.trace.on_step(TracedStep(*about))
        for sequence in outputs.finishes:
            live = lives.get(sequence.group.key)
            if live is not None and live.trace is not None:
                live.trace.on_last_step(step.plan.step_id)

    def on_session_ended(self, executor_id: int, lives: Iterable[LiveRequest]) -> None:
        """As in NoTraces."""
        executor, now_ns = self._executors.identity_of(executor_id), self._clock.monotonic_ns()
        for live in lives:
            if live.trace is not None and live.executor_id == executor_id and live.times.first_plan_ns:
                step_id = live.trace.steps[-1].step_id + 1 if live.trace.steps else 0
                live.trace.on_interrupted("executor_lost", executor, step_id, now_ns)

    def on_attached(self, live: LiveRequest) -> None:
        """As in NoTraces."""
        if live.had_stream and live.trace is not None:
            live.trace.events.append(("stream_resumed", self._clock.monotonic_ns(), {}))

    def on_ended(self, live: LiveRequest) -> None:
        """As in NoTraces."""
        if live.trace is not None:
            self._ended.append(live)
            self._schedule(0.0)

    def stop(self) -> None:
        """As in NoTraces."""
        if self._timer is not None:
            self._timer.cancel()
        while self._ended:
            self._emit(self._ended.popleft())

    def _schedule(self, delay_s: float) -> None:
        if self._timer is None:
            self._timer = self._clock.call_later(delay_s, self._emit_some)

    def _emit_some(self) -> None:
        self._timer = None
        for _ in range(min(_AT_ONCE, len(self._ended))):
            self._emit(self._ended.popleft())
        if self._ended:
            self._schedule(_PAUSE_S)

    def _emit(self, live: LiveRequest) -> None:
        trace = live.trace
        assert trace is not None
        to_wall_ns = self._clock.wall_time_ns() - self._clock.monotonic_ns()
        span = request_span(live, trace, model=self._executors.model.name, to_wall_ns=to_wall_ns)
        root_ids = (int(trace.trace_id, 16), 0) if trace.parent is None else None
        self._sink.emit(span, trace.parent, root_ids)


def request_traces(clock: Clock, sink: SpanSink | None, executors: TracedExecutors) -> NoTraces:
    """The traces for a sink; without one, nothing is traced."""
    return NoTraces() if sink is None else RequestTraces(clock, sink, executors)
