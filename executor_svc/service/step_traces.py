"""Spans of steps: each is the root of a trace of its own, to which the scheduler's spans of requests link.

A step that admits sequences or computes prompts has a span; of the steps that only decode, every sixteenth.
"""

from __future__ import annotations

import time

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult, StepStatus
from cadenza_common.telemetry.spans import STEP_ID, Span, SpanSink, Value, decode_step_has_span, step_ids

_MAX_PENDING = 64
"""Plans of one session without a result; more than may be in flight."""


class StepTraces:
    """The plans of one session that have a span, until their results are there."""

    def __init__(self, sink: SpanSink | None, incarnation: int) -> None:
        self._sink = sink
        self._incarnation = incarnation
        self._pending: dict[int, tuple[int, dict[str, Value]]] = {}
        """By step: when the plan arrived, in nanoseconds since 1970, and what is known of it."""

    def on_plan(self, plan: object) -> None:
        """A plan was read, or rejected, which has no span."""
        if self._sink is None or not isinstance(plan, StepPlan):
            return
        num_chunks = len(plan.scheduled_slots)
        if not (num_chunks or plan.admitted or decode_step_has_span(plan.step_id)):
            return
        if len(self._pending) >= _MAX_PENDING:
            self._pending.clear()
        about: dict[str, Value] = {
            STEP_ID: plan.step_id,
            "cadenza.incarnation": f"{self._incarnation:016x}",
            "cadenza.epoch": plan.epoch,
            "cadenza.step.num_admitted": len(plan.admitted),
            "cadenza.step.num_scheduled_tokens": sum(plan.scheduled_num_tokens),
        }
        self._pending[plan.step_id] = time.time_ns(), about

    def on_result(self, result: StepResult) -> None:
        """A step has ended, and its result is sent."""
        if self._sink is None or (pending := self._pending.pop(result.step_id, None)) is None:
            return
        received_ns, about = pending
        times = result.timings
        about["cadenza.step.num_sampled"] = len(result.slots)
        for name in ("queue", "device", "sample", "moves"):
            about[f"cadenza.step.{name}_s"] = getattr(times, f"{name}_ns") / 1e9
        start_ns = received_ns + times.queue_ns
        error = "" if result.status is StepStatus.OK else result.status.name.lower()
        span = Span("step", start_ns, start_ns + times.total_ns, about, error=error)
        self._sink.emit(span, None, step_ids(self._incarnation, result.step_id))
