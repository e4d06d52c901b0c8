"""Trials of the search for capacities: one rate each, with early stops, progress reports and a time budget."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cadenza_loadtest.measures.latencies import Window, per_request
from cadenza_loadtest.measures.slo import Slo
from cadenza_loadtest.rate_trial import first_judged, judge, judged_span, limits_of
from cadenza_loadtest.requests import LoadTestError, RequestShape
from cadenza_loadtest.schedule import make_schedule
from cadenza_loadtest.settings import LoadSettings
from cadenza_simulator.capacity.capacity import RateTrial
from cadenza_simulator.request_log import Watch
from cadenza_simulator.run import RunOutcome

FEWEST_REQUESTS = 1000
"""Minimum of a trial whose length is not given: with a share of 99%, 10 requests may miss the SLO."""
_AT_ONCE = 300
"""Requests per executor, at most 1000, of the burst that measures the peak throughput: the search starts near it."""
_REPORT_EVERY_S = 0.1

RunAt = Callable[[LoadSettings, int, Watch | None], RunOutcome]
"""Runs the settings with a seed and, if given, a watch that may end the run."""
OnProgress = Callable[[float, float | None], None]
"""Receives the share of the trial that has run, and the share of the judged requests that kept the SLO so far; None:
none has been judged."""
DEFAULT_BUDGET_S = 45.0
"""Leaves time to start and to write the results: the whole command takes about a minute."""
_BUDGET_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
_BUDGET_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([smh]?)")


class BudgetSpentError(Exception):
    """The time budget ended a trial or a burst: it says nothing."""


class Misses:
    """A watch that ends a run once more than `num_allowed` judged requests have missed a limit."""

    def __init__(self, slo: Slo, first_judged: int, num_allowed: int, span: Window = (0.0, math.inf)) -> None:
        """Judges the requests from index `first_judged` on that are due within `span`."""
        self.num_judged = 0
        self.num_missed = 0
        self._slo = slo
        self._first_judged = first_judged
        self._num_allowed = num_allowed
        self._span = span

    @property
    def share(self) -> float:
        """Share of the requests judged so far that kept every limit."""
        return 1 - self.num_missed / max(1, self.num_judged)

    def ended(
        self, shape: RequestShape, due_s: float, first_s: float, last_s: float, num_output_tokens: int, error: str
    ) -> bool:
        """Take a request that has ended; returns whether the run is to end. An ITL limit is judged at the end of the
        run."""
        if shape.index < self._first_judged or not self._span[0] <= due_s <= self._span[1]:
            return False
        self.num_judged += 1
        slo, further = self._slo, num_output_tokens / shape.num_samples - 1
        kept = not error
        kept = kept and (slo.ttft_s is None or first_s - due_s <= slo.ttft_s)
        kept = kept and (slo.e2e_s is None or last_s - due_s <= slo.e2e_s)
        kept = kept and (slo.tpot_s is None or further <= 0 or (last_s - first_s) / further <= slo.tpot_s)
        self.num_missed += not kept
        return self.num_missed > self._num_allowed


class Supervised:
    """A watch that counts requests, reports progress, and ends the run when the time budget is spent.

    Between these it leaves the decision to `inner`.
    """

    def __init__(
        self, budget: TimeBudget, inner: Watch | None = None, on_ended: Callable[[int], None] = lambda _: None
    ) -> None:
        """`on_ended` receives the number of requests that have ended, ten times a second."""
        self.num_ended = 0
        self.out_of_time = False
        self._budget = budget
        self._inner = inner
        self._on_ended = on_ended
        self._reports_at = 0.0

    def ended(
        self, shape: RequestShape, due_s: float, first_s: float, last_s: float, num_output_tokens: int, error: str
    ) -> bool:
        """Take a request that has ended; returns whether the run is to end."""
        self.num_ended += 1
        elapsed_s = self._budget.elapsed_s
        if elapsed_s >= self._reports_at:
            self._reports_at = elapsed_s + _REPORT_EVERY_S
            self._on_ended(self.num_ended)
        if elapsed_s >= self._budget.seconds:
            self.out_of_time = True
            return True
        inner = self._inner
        return inner is not None and inner.ended(shape, due_s, first_s, last_s, num_output_tokens, error)


@dataclass(slots=True)
class TrialRunner:
    """Runs trials for one number of executors, and measures how long a request takes to simulate."""

    run: RunAt
    budget: TimeBudget
    num_requests: int = 0
    """Simulated requests so far."""
    wall_s: float = 0.0
    """Real seconds that they took."""

    def burst(self, settings: LoadSettings, num_executors: int) -> tuple[float, float]:
        """Let many requests arrive at once; returns completed requests per second and their mean E2E in seconds.

        Raises LoadTestError if no request is served, and BudgetSpentError.
        """
        many = min(_AT_ONCE * num_executors, 1000, settings.num_requests or FEWEST_REQUESTS)
        at_once = settings.model_copy(update={"duration_s": None, "request_rate": math.inf})
        if settings.from_file:  # a file may hold fewer requests
            firsts = (shape for _, shape in make_schedule(at_once, settings.seed) if shape.turn == 0)
            many = sum(1 for _ in itertools.islice(firsts, many))
        outcome = self._run(at_once.model_copy(update={"num_requests": many}), settings.seed, Supervised(self.budget))
        columns = outcome.requests
        num_ok = int(columns.ok.sum())
        if not num_ok:
            raise LoadTestError("--find-max-rate: no request was served; is every request too long?")
        return num_ok / outcome.duration_s, float(np.nanmean(per_request(columns)["e2e_s"][columns.ok]))

    def trial(self, settings: LoadSettings, on_progress: OnProgress) -> RateTrial:
        """Run all repetitions; the trial ends as soon as too many requests have missed a limit.

        Raises BudgetSpentError if the time budget ends it before it is decided.
        """
        outcomes: list[tuple[int, RunOutcome]] = []
        limits, rate = limits_of(settings), settings.request_rate
        for index in range(settings.repetitions):
            seed = settings.seed + index
            count = sum(1 for _ in make_schedule(settings, seed))  # including later turns of sessions
            first = first_judged(settings, count)
            allowed = math.floor((1 - settings.slo_share) * (count - first))
            misses = Misses(limits, first, allowed, judged_span(settings))

            def report(num_ended: int, index: int = index, count: int = count, misses: Misses = misses) -> None:
                share = misses.share if misses.num_judged else None
                on_progress((index + num_ended / max(1, count)) / settings.repetitions, share)

            outcome = self._run(settings, seed, Supervised(self.budget, misses, report))
            if outcome.ended_early:
                return RateTrial(rate, misses.share, held=False, ended_early=True, settings=settings, outcomes=())
            outcomes.append((seed, outcome))
        found = judge([outcome.requests for _, outcome in outcomes], settings)
        return RateTrial(
            rate,
            found.share,
            found.held,
            ended_early=False,
            settings=settings,
            outcomes=tuple(outcomes),
            kept_up=found.kept_up,
        )

    def _run(self, settings: LoadSettings, seed: int, watch: Supervised) -> RunOutcome:
        began = self.budget.elapsed_s
        if began >= self.budget.seconds:
            raise BudgetSpentError
        outcome = self.run(settings, seed, watch)
        self.num_requests += watch.num_ended
        self.wall_s += self.budget.elapsed_s - began
        if watch.out_of_time:
            raise BudgetSpentError
        return outcome


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """Seconds of real time, from when this object is made; inf: no limit."""

    seconds: float = math.inf
    clock: Callable[[], float] = time.monotonic
    """The present time, in seconds."""
    started: float = field(init=False)

    def __post_init__(self) -> None:
        """Start the clock."""
        object.__setattr__(self, "started", self.clock())

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.started

    @property
    def left_s(self) -> float:
        """Seconds that are left, 0 at least."""
        return max(0.0, self.seconds - self.elapsed_s)


def read_time_budget(text: str | None) -> float:
    """Seconds of `90`, `90s`, `5m` or `1h`; inf for `0` and `none`, the default for None. Raises LoadTestError."""
    if text is None:
        return DEFAULT_BUDGET_S
    found = _BUDGET_FORM.fullmatch(text.strip())
    if text.strip() != "none" and found is None:
        raise LoadTestError(f"--time-budget {text}: must be seconds, or a number with s, m or h, or none, as 90, 5m")
    seconds = 0.0 if found is None else float(found[1]) * _BUDGET_UNITS[found[2]]
    return seconds or math.inf
