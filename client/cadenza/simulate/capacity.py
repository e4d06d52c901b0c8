"""Capacity: the highest request rate that a number of executors holds within an SLO, by a search with early stops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cadenza.loadtest.latencies import Window, per_request
from cadenza.loadtest.rate_search import RateSearch
from cadenza.loadtest.rate_trial import at_rate, first_judged, judge, judged_span, limits_of
from cadenza.loadtest.requests import LoadTestError, RequestShape
from cadenza.loadtest.schedule import make_schedule
from cadenza.loadtest.settings import LoadSettings
from cadenza.loadtest.slo import Slo
from cadenza.simulate.request_log import Watch
from cadenza.simulate.run import Outcome

TOLERANCE = 0.02
TRIAL_S = 300.0
"""Virtual seconds of arrivals in a trial if the settings give neither a number of requests nor a duration."""
FEWEST_REQUESTS = 1000
"""Minimum of such a trial: with a share of 99%, 10 requests may miss the SLO."""
_AT_ONCE = 300
"""Requests per executor, at most 1000, of the burst that measures the peak throughput: the search starts near it."""
_FIRST_SHARE = 0.8

RunAt = Callable[[LoadSettings, int, Watch | None], Outcome]
"""Runs the settings with a seed and, if given, a watch that may end the run."""


@dataclass(frozen=True, slots=True)
class RateTrial:
    """One rate that the search tried."""

    rate: float
    share: float
    """Share of the judged requests that kept every limit, over all repetitions; of the requests seen so far if the
    trial ended early."""
    held: bool
    ended_early: bool
    settings: LoadSettings
    outcomes: tuple[tuple[int, Outcome], ...]
    """Seed and run of each repetition; empty if the trial ended early."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The result of a search for one number of executors."""

    num_executors: int
    held: float | None
    """Highest rate that held, in requests per second; None: none did."""
    failed: float | None
    """Lowest rate that failed; None: none did."""
    trials: tuple[RateTrial, ...]

    @property
    def kept(self) -> list[RateTrial]:
        """The trials that ran to their end, sorted by rate."""
        return sorted((trial for trial in self.trials if trial.outcomes), key=lambda trial: trial.rate)

    @property
    def best(self) -> RateTrial | None:
        """The trial with the highest rate that held."""
        return next((trial for trial in reversed(self.kept) if trial.held), None)


def find_capacity(settings: LoadSettings, num_executors: int, run: RunAt, *, tolerance: float = TOLERANCE) -> Capacity:
    """Search for the highest rate at which `settings.slo_share` of the requests keep `settings.slo`.

    The search starts at the settings' rate or, without one, near the throughput of a burst. It ends when the lowest
    rate that failed is within `tolerance` of the highest that held. `at_rate` gives a trial's settings and `judge`
    decides whether its rate held; a trial ends as soon as too many requests have missed a limit. Raises LoadTestError.
    """
    limits = limits_of(settings)
    start = settings.request_rate
    if start == math.inf:
        start = _FIRST_SHARE * _throughput(settings, num_executors, run)
    search, trials = RateSearch(_rounded(start), tolerance), []
    while (rate := search.next_rate()) is not None:
        rate = _rounded(rate)
        trial = at_rate(settings, rate, seconds=TRIAL_S, num_requests=FEWEST_REQUESTS)
        trials.append(_try(trial, rate, limits, run))
        search.record(rate, trials[-1].held)
    return Capacity(num_executors, search.held, search.failed, tuple(trials))


def _rounded(rate: float) -> float:
    """The rate with four significant digits, so that the reported rate is the rate that was tried."""
    return float(f"{rate:.4g}")


def _throughput(settings: LoadSettings, num_executors: int, run: RunAt) -> float:
    """Requests per second that complete when many arrive at once."""
    many = min(_AT_ONCE * num_executors, 1000, settings.num_requests or FEWEST_REQUESTS)
    at_once = settings.model_copy(update={"duration_s": None})
    if settings.from_file:  # a file may hold fewer requests
        firsts = (shape for _, shape in make_schedule(at_once, settings.seed) if shape.turn == 0)
        many = sum(1 for _ in itertools.islice(firsts, many))
    outcome = run(at_once.model_copy(update={"num_requests": many}), settings.seed, None)
    num_ok = int(outcome.requests.ok.sum())
    if not num_ok:
        raise LoadTestError("--find-max-rate: no request was served; is every request too long?")
    return num_ok / outcome.duration_s


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


def _try(settings: LoadSettings, rate: float, slo: Slo, run: RunAt) -> RateTrial:
    outcomes: list[tuple[int, Outcome]] = []
    for seed in range(settings.seed, settings.seed + settings.repetitions):
        count = sum(1 for _ in make_schedule(settings, seed))  # including later turns of sessions
        first = first_judged(settings, count)
        allowed = math.floor((1 - settings.slo_share) * (count - first))
        misses = Misses(slo, first, allowed, judged_span(settings))
        outcome = run(settings, seed, misses)
        if outcome.ended_early:
            share = 1 - misses.num_missed / max(1, misses.num_judged)
            return RateTrial(rate, share, held=False, ended_early=True, settings=settings, outcomes=())
        outcomes.append((seed, outcome))
    found = judge([outcome.requests for _, outcome in outcomes], settings)
    return RateTrial(rate, found.share, found.held, ended_early=False, settings=settings, outcomes=tuple(outcomes))


def summary_of(capacity: Capacity) -> dict[str, float | int | None]:
    """The table row for a number of executors: the rate, and the latencies in seconds and tokens per executor at it."""
    row: dict[str, float | int | None] = {"executors": capacity.num_executors, "request_rate": capacity.held}
    best = capacity.best
    if best is None:
        return row
    columns = [outcome.requests for _, outcome in best.outcomes]
    latencies = [per_request(each) for each in columns]
    for name in ("ttft_s", "tpot_s"):
        values = np.concatenate([each[name] for each in latencies])
        known = values[~np.isnan(values)]
        for mark in (50, 99):
            row[f"{name}_p{mark}"] = float(np.percentile(known, mark)) if len(known) else None
    tokens = sum(int(each.num_output_tokens.sum()) for each in columns)
    seconds = sum(outcome.duration_s for _, outcome in best.outcomes)
    row["output_tokens_per_s"] = tokens / seconds
    row["tokens_per_s_per_executor"] = tokens / seconds / capacity.num_executors
    row["share"] = best.share
    return row


def as_plot(capacities: Sequence[Capacity]) -> tuple[list[float], list[float]]:
    """The curve of rates held over numbers of executors; numbers that hold no rate are left out."""
    found = [(float(each.num_executors), each.held) for each in capacities if each.held is not None]
    return [count for count, _ in found], [rate for _, rate in found]
