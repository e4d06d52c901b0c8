"""Host gaps, measured from a recording: scheduling, transit both ways, the executor's own pause, and their
variation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cadenza_loadtest.requests import Floats
from cadenza_simulator.recordings import RecordedSteps

_TRIMMED_SHARE = 0.01
"""Share of the values, the largest ones, that means leave out."""
_UNDISTURBED = 0.1
"""Share of the steps, those with the shortest wait at the executor, that found it idle: their wait is not queueing."""
_QUEUED_NS = 300_000.0
"""A plan that waited this much longer than the undisturbed ones arrived while another step ran."""
_FEWEST = 20


@dataclass(frozen=True, slots=True)
class HostGaps:
    """The gaps between steps: means in microseconds, unless stated otherwise."""

    plan_us: float
    """From when a plan was due until the scheduler had made it."""
    transit_us: float
    """Half of the time between a plan and its result that is not the executor's own."""
    gap_us: float
    """From the end of a step to the start of the next one whose plan was already queued: a median."""
    variation: float
    """Coefficient of variation of plan_us and of each transit_us, which are assumed equal and independent."""


def measure_host_gaps(steps: RecordedSteps) -> HostGaps:
    """Compute the gaps from the times of plans and results, and from the times that the executor reports."""
    floor_ns = float(np.quantile(steps.queue_ns, _UNDISTURBED))
    beyond_us = (steps.applied_s - steps.planned_s) * 1e6 - (steps.queue_ns - floor_ns + steps.total_ns) / 1000
    late_us = steps.late_s[~np.isnan(steps.late_s)] * 1e6
    (late, late_variance), (beyond, beyond_variance) = _moments(late_us), _moments(beyond_us)
    squares = late**2 + beyond**2 / 2  # of plan_us, and of transit_us twice
    return HostGaps(
        plan_us=round(late, 1),
        transit_us=round(beyond / 2, 1),
        gap_us=round(_gap_us(steps, floor_ns), 1),
        variation=round(min(3.0, math.sqrt((late_variance + beyond_variance) / squares)), 3) if squares else 0.0,
    )


def _gap_us(steps: RecordedSteps, floor_ns: float) -> float:
    """The time from result to result less the step itself, over steps whose plan was queued before the previous step
    ended.

    The median: a late result may reflect the scheduler rather than the executor.
    """
    pause_us = np.diff(steps.applied_s) * 1e6 - steps.total_ns[1:] / 1000
    queued = steps.queue_ns[1:] > floor_ns + _QUEUED_NS
    return max(0.0, float(np.median(pause_us[queued]))) if queued.sum() >= _FEWEST else 0.0


def _moments(values: Floats) -> tuple[float, float]:
    """Mean (0 or more) and variance without the largest values; (0, 0) of no values."""
    if not len(values):
        return 0.0, 0.0
    kept = values[values <= np.quantile(values, 1 - _TRIMMED_SHARE)]
    return max(0.0, float(kept.mean())), float(kept.var())
