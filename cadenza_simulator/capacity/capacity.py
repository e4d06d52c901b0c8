"""Capacity: the highest request rate that a number of executors holds within an SLO, and the trials that showed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cadenza_loadtest.measures.latencies import per_request
from cadenza_loadtest.settings import LoadSettings
from cadenza_simulator.run import RunOutcome


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
    outcomes: tuple[tuple[int, RunOutcome], ...]
    """Seed and run of each repetition; empty if the trial ended early."""
    kept_up: bool = True
    """Whether about as many requests ended as arrived; not known of a trial that ended early."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The result of a search for one number of executors."""

    num_executors: int
    held: float | None
    """Highest rate that held, in requests per second; None: none did."""
    failed: float | None
    """Lowest rate that failed; None: none did."""
    trials: tuple[RateTrial, ...]
    """All trials of the length `trial_s`, in the order in which they ran."""
    trial_s: float | None = None
    """Virtual seconds of arrivals in each of these trials; None: the settings or the workload's file say how many."""
    is_over: bool = True
    """Whether the search ended by itself: `failed` is close to `held`, or no rate at all holds or fails."""
    is_full_length: bool = True
    """Whether these trials are as long as without a time budget."""

    @property
    def complete(self) -> bool:
        """Whether the result is that of a search without a time budget and without Ctrl-C."""
        return self.is_over and self.is_full_length

    @property
    def kept(self) -> list[RateTrial]:
        """The trials that ran to their end, sorted by rate."""
        return sorted((trial for trial in self.trials if trial.outcomes), key=lambda trial: trial.rate)

    @property
    def best(self) -> RateTrial | None:
        """The trial with the highest rate that held."""
        return next((trial for trial in reversed(self.kept) if trial.held), None)


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
