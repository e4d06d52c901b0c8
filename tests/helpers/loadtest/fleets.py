"""Small fleets for tests: executors of round numbers, requests by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.fleet.arrivals import Arrivals, alone
from benchmarks.fleet.caches import ExecutorModel, model_of
from benchmarks.fleet.engine import Fleet, FleetPlan
from benchmarks.fleet.results import FleetResult
from tests.helpers.loadtest.simulations import profile

COSTS = {"step_us": 10_000.0, "token_us": 10.0}


def model(
    costs: dict[str, float] | None = None, overheads: dict[str, float] | None = None, **limits: int
) -> ExecutorModel:
    """An executor; by default a step takes 10 ms and 10 µs for each token."""
    given = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 4096} | limits
    return model_of(profile(COSTS if costs is None else costs, overheads, name="toy", **given))


def requests(
    *rows: tuple[float, int, int], sessions: Sequence[int] | None = None, shared: Sequence[int] = ()
) -> Arrivals:
    """Requests by (due_s, prompt, output); each of its session, which begins with its first request."""
    due_s, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    made = alone(due_s.astype(np.float64), prompt.astype(np.int64), output.astype(np.int64))
    if sessions is None:
        return made
    numbers = np.array(sessions)
    fresh = np.array([number not in sessions[:place] for place, number in enumerate(sessions)])
    return Arrivals(
        made.due_s, made.prompt, made.output, numbers, fresh, np.array(shared, np.int64), made.group, made.group_tokens
    )


class Given:
    """A source of these requests."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self.num_sessions = int(arrivals.session.max(initial=-1)) + 1
        self.num_groups = int(arrivals.group.max(initial=-1)) + 1
        self.max_output = int(arrivals.output.max(initial=1))

    def take(self, begin_s: float, end_s: float) -> Arrivals:
        due_s = self._arrivals.due_s
        return self._arrivals.select((due_s >= begin_s) & (due_s < end_s))


def serve(arrivals: Arrivals, of: ExecutorModel | None = None, **plan: Any) -> FleetResult:
    """Let a fleet serve them; by default one executor, time slices of 0.1 s."""
    given = {"num_schedulers": 1, "num_executors": 1, "duration_s": 60.0, "slice_s": 0.1} | plan
    return Fleet(FleetPlan(model=of or model(), **given), Given(arrivals)).run()
