"""Runs the scheduler's core step by step and observes its state after each plan, beyond what StepColumns record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.common.rows import BenchmarkError
from benchmarks.experiments.simulated import scheduler_config
from cadenza_common.plan.sampling import SequenceSampling
from cadenza_loadtest.requests import RequestShape
from cadenza_simulator.executor_profiles import ExecutorProfile
from cadenza_simulator.lanes import TOKEN, SimulatedLane
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import BeamSpec, RequestSpec

Look = Callable[[Scheduler, float], None]
"""Called with the core after each plan, and the seconds until the step's result is applied."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """The result of a run."""

    duration_s: float
    """From the start to the last token, in virtual time."""
    num_steps: int
    num_preemptions: int


def step_through(
    profile: ExecutorProfile,
    shapes: Sequence[RequestShape],
    look: Look,
    *,
    policies: Policies | None = None,
    watermark: float = 0.01,
) -> Stepped:
    """Serve requests that all arrive at once, with one plan in flight, so that the state does not change while a plan
    runs.

    Raises BenchmarkError if the core finds nothing to plan while requests wait.
    """
    core = Scheduler(policies or Policies())
    core.add_executor(0, profile.spec(scheduler_config({"watermark": watermark})))
    lane, now = SimulatedLane(0, profile, core.lanes[0], 1), 0.0
    for shape in shapes:
        core.add_request(_spec(shape), now)
    has_beams = any(shape.beam_width for shape in shapes)
    while core.groups:
        if core.plan_step(0, now) is None:
            raise BenchmarkError(f"{len(core.groups)} requests wait forever: the policy admits none of them")
        inflight_step = lane.launch(lane.core.inflight[-1], now, beams=has_beams)
        look(core, inflight_step.result_at - now)
        now = inflight_step.result_at
        lane.take_result(now)
        core.apply_result(0, inflight_step.result, now)
        core.take_finished()
    return Stepped(now, core.num_steps, core.num_preemptions)


def apart(shapes: Sequence[RequestShape]) -> list[RequestShape]:
    """The same without sharing: each sample or beam as a separate request."""
    counts = [shape.beam_width or shape.n for shape in shapes]
    alone = [
        replace(shape, n=1, beam_width=0) for shape, count in zip(shapes, counts, strict=True) for _ in range(count)
    ]
    return [replace(shape, index=index) for index, shape in enumerate(alone)]


def _spec(shape: RequestShape) -> RequestSpec:
    return RequestSpec(
        str(shape.index),
        (TOKEN,) * shape.num_prompt_tokens,
        SequenceSampling(),
        shape.num_output_tokens,
        num_samples=1 if shape.beam_width else shape.n,
        beams=BeamSpec(shape.beam_width) if shape.beam_width else None,
    )
