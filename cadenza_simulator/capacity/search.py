"""The search for the capacity of several numbers of executors: what each learns shortens the next, within a budget.

A pilot with short trials finds about where the highest rate is, and the search proper starts there with small steps.
The next number of executors starts at the proportional rate, without a pilot. With a time budget the trials of the
search proper are as long as it affords.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cadenza_loadtest.rate_search import RateSearch
from cadenza_loadtest.rate_trial import at_rate, limits_of
from cadenza_loadtest.settings import LoadSettings
from cadenza_simulator.capacity.capacity import Capacity, RateTrial
from cadenza_simulator.capacity.rate_trials import FEWEST_REQUESTS, BudgetSpentError, RunAt, TimeBudget, TrialRunner

TOLERANCE = 0.02
TRIAL_S = 300.0
"""Virtual seconds of arrivals in a trial if the settings give neither a number of requests nor a duration, and the
time budget affords it."""
_PILOT_SHARE = 1 / 16
"""Length of a pilot's trials, as a share of `TRIAL_S`."""
_PILOT_TOLERANCE = 0.06
_LIFETIMES = 4
"""Fewest mean E2Es of a burst's requests in a trial: the system must have time to fill."""
_FIRST_SHARE = 0.8
"""Start of a pilot, as a share of the throughput of a burst."""
_EXPECTED_TRIALS = 3
"""Trials of full length that a search takes from a good start: on the whole, as trials that fail end early."""
_USABLE = 0.9
"""Share of what is left of a budget that the planned trials may take: the estimates are rough."""


@dataclass(frozen=True, slots=True)
class TrialProgress:
    """What the search does now."""

    num_executors: int
    rate: float
    """Requests per second."""
    number: int
    """This trial's number among all trials, from 1."""
    expected: int
    """Estimate of the number of all trials."""
    done: float
    """Share of this trial that has run."""
    share: float | None
    """Share of its requests so far that kept the SLO; None: none has been judged."""
    elapsed_s: float
    """Real seconds since the search began."""
    left_s: float
    """Estimate of the real seconds that are left."""


class SearchProgress(Protocol):
    """Shows the progress of a search."""

    def say(self, text: str) -> None:
        """Show a sentence."""

    def on_trial(self, now: TrialProgress) -> None:
        """Show what is being tried; at the start of each trial, and ten times a second."""


@dataclass(slots=True)
class _Stage:
    """Trials of one length for one number of executors."""

    trial_s: float
    search: RateSearch
    trials: list[RateTrial] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.search.next_rate() is None


class CapacitySearch:
    """Find the highest rate at which `settings.slo_share` of the requests keep `settings.slo`, for each number of
    executors in `runs`.

    The first pilot starts at the settings' rate or, without one, near the throughput of a burst. The search for a
    number of executors ends when the lowest rate that failed is within `tolerance` of the highest that held. `at_rate`
    gives a trial's settings and `judge` decides whether its rate held. `capacities` is what is known so far, also after
    an exception: run raises LoadTestError, and KeyboardInterrupt for Ctrl-C.
    """

    def __init__(
        self,
        settings: LoadSettings,
        runs: Mapping[int, RunAt],
        view: SearchProgress,
        *,
        budget: TimeBudget | None = None,
        tolerance: float = TOLERANCE,
    ) -> None:
        limits_of(settings)  # raises if there are none
        self.budget = budget or TimeBudget()
        self._settings = settings
        self._view = view
        self._tolerance = tolerance
        self._runners = {count: TrialRunner(run, self.budget) for count, run in runs.items()}
        self._stages: dict[int, list[_Stage]] = {count: [] for count in runs}
        self._is_long = settings.num_requests is not None or settings.duration_s is not None or settings.from_file
        """Whether the settings say how long a trial is."""
        self._pilot_s = TRIAL_S
        self._waiting = sorted(runs)
        """Numbers of executors that have not been searched."""

    def run(self) -> None:
        """Search for every number of executors, or until the budget is spent."""
        guess, trial_s = None, TRIAL_S
        try:
            while self._waiting:
                count = self._waiting[0]
                if guess is None:
                    guess = self._pilot(count)
                if guess is not None:
                    trial_s = min(trial_s, self._affordable_s(guess / count))
                    guess = self._search(count, trial_s, guess)
                self._waiting.pop(0)
                if guess is not None and self._waiting:
                    guess *= self._waiting[0] / count
        except BudgetSpentError:
            self._view.say(f"the time budget of {self.budget.seconds:g} s is spent")

    @property
    def capacities(self) -> list[Capacity]:
        """What is known, for each number of executors in the order of `runs`."""
        return [self._capacity(count) for count in self._stages]

    def _pilot(self, count: int) -> float | None:
        """About the highest rate that holds; None: none does, or every rate does."""
        throughput, e2e_s = self._runners[count].burst(self._settings, count)
        if not self._is_long:
            self._pilot_s = min(TRIAL_S, max(_PILOT_SHARE * TRIAL_S, _LIFETIMES * e2e_s))
        given = self._settings.request_rate
        start = given if given != math.inf else _FIRST_SHARE * throughput
        tolerance = self._tolerance if self._is_long else max(_PILOT_TOLERANCE, self._tolerance)
        stage = _Stage(self._pilot_s, RateSearch(_rounded(start), tolerance))
        self._stages[count].append(stage)
        self._finish(count, stage)
        return None if stage.search.failed is None else stage.search.held

    def _search(self, count: int, trial_s: float, guess: float) -> float | None:
        """The search proper; returns the highest rate that held."""
        stages = self._stages[count]
        if stages and self._is_as_long(stages[-1], trial_s):  # the pilot's own trials, to a finer tolerance
            stages[-1].search.tolerance = self._tolerance
        else:
            stages.append(_Stage(trial_s, RateSearch(_rounded(guess), self._tolerance, factor=1 + self._tolerance)))
        self._finish(count, stages[-1])
        return stages[-1].search.held

    def _finish(self, count: int, stage: _Stage) -> None:
        """Try rates until the stage is over; raises BudgetSpentError."""
        while (rate := stage.search.next_rate()) is not None:
            rate = _rounded(rate)
            self._report(count, stage, rate, 0.0, None)
            trial = self._runners[count].trial(
                at_rate(self._settings, rate, seconds=stage.trial_s, num_requests=FEWEST_REQUESTS),
                lambda done, share, rate=rate: self._report(count, stage, rate, done, share),  # type: ignore[misc]
            )
            stage.trials.append(trial)
            stage.search.record(rate, trial.held)
            self._view.say(_trial_text(count, trial))

    def _affordable_s(self, rate_each: float) -> float:
        """Virtual seconds of arrivals in a trial that the budget affords for every number that waits; `rate_each`:
        requests per second per executor. Never less than a pilot's."""
        per_virtual_s = sum(self._requests_s(rate_each * count) for count in self._waiting)
        affordable_s = _USABLE * self.budget.left_s / max(1e-9, _EXPECTED_TRIALS * per_virtual_s)
        return min(TRIAL_S, max(self._pilot_s, float(f"{affordable_s:.2g}")))

    def _requests_s(self, num_requests: float) -> float:
        """Estimate of the real seconds that so many simulated requests take, with the settings' repetitions."""
        wall_s = sum(runner.wall_s for runner in self._runners.values())
        simulated = sum(runner.num_requests for runner in self._runners.values())
        return num_requests * self._settings.repetitions * wall_s / max(1, simulated)

    def _report(self, count: int, stage: _Stage, rate: float, done: float, share: float | None) -> None:
        before = sum(len(each.trials) for each in self._all_stages())
        following = stage.search.expected_trials() - 1
        one_s = self._requests_s(self._num_requests(rate, stage.trial_s))
        left_s, expected = (1 - done + max(0, following)) * one_s, before + 1 + max(0, following)
        proper = [each for each in self._waiting if each != count or self._is_pilot(count, stage)]
        trial_s = min(TRIAL_S, self._affordable_s(rate / count)) if proper else stage.trial_s
        for each in proper:
            expected += _EXPECTED_TRIALS
            left_s += _EXPECTED_TRIALS * self._requests_s(self._num_requests(rate * each / count, trial_s))
        left_s = min(left_s, self.budget.left_s)
        self._view.on_trial(
            TrialProgress(count, rate, before + 1, expected, done, share, self.budget.elapsed_s, left_s)
        )

    def _is_pilot(self, count: int, stage: _Stage) -> bool:
        return not self._is_long and stage is self._stages[count][0] and stage.search.tolerance > self._tolerance

    def _num_requests(self, rate: float, trial_s: float) -> float:
        """About how many requests a trial has."""
        found = at_rate(self._settings, rate, seconds=trial_s, num_requests=FEWEST_REQUESTS).num_requests
        return float(FEWEST_REQUESTS if found is None else found)

    def _is_as_long(self, stage: _Stage, trial_s: float) -> bool:
        """Whether the stage's bracket is from trials as long as those of `trial_s`: slow ones have their fewest
        requests."""
        search = stage.search
        bracket = [rate for rate in (search.held, search.failed) if rate is not None]
        return all(self._num_requests(rate, stage.trial_s) == self._num_requests(rate, trial_s) for rate in bracket)

    def _all_stages(self) -> Iterator[_Stage]:
        return (stage for stages in self._stages.values() for stage in stages)

    def _capacity(self, count: int) -> Capacity:
        """From the longest trials that gave a bracket; without a bracket, from the longest that gave anything."""
        tried = [stage for stage in self._stages[count] if stage.trials]
        bracketed = [stage for stage in tried if stage.search.held is not None and stage.search.failed is not None]
        if not tried:
            return Capacity(count, None, None, (), is_over=False)
        stage = (bracketed or tried)[-1]
        search, none = stage.search, stage.search.held is None or stage.search.failed is None
        rate = next(rate for rate in (search.held, search.failed) if rate is not None)
        return Capacity(
            count,
            search.held,
            search.failed,
            tuple(stage.trials),
            trial_s=None if self._is_long else self._num_requests(rate, stage.trial_s) / rate,
            is_over=stage.is_over and (none or search.tolerance <= self._tolerance),
            is_full_length=none or self._is_as_long(stage, TRIAL_S),
        )


def _rounded(rate: float) -> float:
    """The rate with four significant digits, so that the reported rate is the rate that was tried."""
    return float(f"{rate:.4g}")


def _trial_text(count: int, trial: RateTrial) -> str:
    how = f"{trial.share:.1%} of the requests"
    if trial.ended_early:
        how = "ended early, too many were late"
    elif not trial.kept_up:
        how += ", but they came faster than they ended"
    elif not trial.held and trial.share >= trial.settings.slo_share:
        how += ", but too few of the last third"
    executors = "1 executor" if count == 1 else f"{count} executors"
    return f"{executors}, {trial.rate:.4g} requests/s: {how}: {'holds' if trial.held else 'does not hold'}"
