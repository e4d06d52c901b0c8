"""What lies between steps, from a recording: the scheduler, both ways, the executor's own pause; and how it varies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cadenza.loadtest.requests import Floats
from cadenza.simulate.recordings import RecordedSteps

_TRIMMED_SHARE = 0.01
"""Of the largest values, which are left out of means."""
_UNDISTURBED = 0.1
"""The share of the steps that waited the least at the executor found it idle: what they waited is no queue."""
_QUEUED_NS = 300_000.0
"""A plan that waited so much longer than those came while another step ran."""
_FEWEST = 20


@dataclass(frozen=True, slots=True)
class HostGaps:
    """Means in microseconds, unless said otherwise."""

    plan_us: float
    """From when a plan was due to its making."""
    transit_us: float
    """Half of what lies between a plan and its result besides the executor's own times."""
    gap_us: float
    """From the end of a step to the begin of the next one, where its plan was there: a median."""
    variation: float
    """Coefficient of variation of plan_us and of each transit_us, taken to be the same and independent."""


def measure_host_gaps(steps: RecordedSteps) -> HostGaps:
    """From when plans were made, when results came, and what the executor says of its own times."""
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
    """Of steps whose plan was there before the one in front had ended: from result to result, less the step itself.

    The median, as a result that comes late may say more of the scheduler than of the executor.
    """
    pause_us = np.diff(steps.applied_s) * 1e6 - steps.total_ns[1:] / 1000
    queued = steps.queue_ns[1:] > floor_ns + _QUEUED_NS
    return max(0.0, float(np.median(pause_us[queued]))) if queued.sum() >= _FEWEST else 0.0


def _moments(values: Floats) -> tuple[float, float]:
    """Mean, 0 or more, and variance, without the largest; 0 and 0 of nothing."""
    if not len(values):
        return 0.0, 0.0
    kept = values[values <= np.quantile(values, 1 - _TRIMMED_SHARE)]
    return max(0.0, float(kept.mean())), float(kept.var())
