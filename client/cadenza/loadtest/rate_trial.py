"""A trial of the search for the highest rate: what it sends, and whether its rate holds; on a server and simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cadenza.loadtest.columns import RequestColumns
from cadenza.loadtest.latencies import Rows, Window, is_within
from cadenza.loadtest.requests import LoadTestError
from cadenza.loadtest.settings import LoadSettings, parse_window
from cadenza.loadtest.slo import Slo, kept
from cadenza.loadtest.windows import kept_up, steady_window

FIRST_RATE = 1.0
"""Requests per second, where the search begins if nothing better is known."""
_WARM_UP_SHARE = 0.1
"""Of the requests: the first find an empty system, and are not judged."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of a rate."""

    held: bool
    share: float
    """Of the judged requests, those that kept every limit: the mean over the runs."""
    kept_up: bool
    """Did about as many requests end as came, in the second half of the arrivals of every run."""


def at_rate(settings: LoadSettings, rate: float, *, seconds: float, num_requests: int) -> LoadSettings:
    """A trial's settings: with the number of requests, or for the time, that they name; else all of a file, else for
    so many `seconds` and so many requests at least.

    All rates have the same requests in the same pattern of arrivals, stretched: a lower one is not worse by chance.
    """
    change: dict[str, float | int | None] = {"request_rate": rate}
    if settings.num_requests is None and not settings.from_file:
        fewest, lasting = (num_requests, seconds) if settings.duration_s is None else (1, settings.duration_s)
        change |= {"num_requests": max(fewest, math.ceil(rate * lasting)), "duration_s": None}
    return settings.model_copy(update=change)


def judge(runs: Sequence[RequestColumns], settings: LoadSettings) -> Judgement:
    """Does the rate of these runs, one or more, hold. It does if

    - `settings.slo_share` of the requests keep `settings.slo`, over the run without its first tenth and over its last
      third alone: the means over all runs, and
    - the server keeps up: in the second half of the arrivals about as many requests end as come, in every run.

    Raises LoadTestError if there is no SLO, or an ITL limit without inter-token latencies.
    """
    wholes, ends = zip(*(_shares(run, settings) for run in runs), strict=True)
    keeps_up = all(kept_up(run, _window(run, settings)) is not False for run in runs)
    share = float(np.mean(wholes))
    held = keeps_up and min(share, float(np.mean(ends))) >= settings.slo_share
    return Judgement(held, share, keeps_up)


def first_judged(settings: LoadSettings, num_requests: int) -> int:
    """The index of the first request that is judged, of so many; with a window of the user's own that says all."""
    return 0 if parse_window(settings.window) else int(_WARM_UP_SHARE * num_requests)


def judged_span(settings: LoadSettings) -> Window:
    """When requests must be due to be judged, in seconds of the run."""
    return parse_window(settings.window) or (settings.warm_up_s, math.inf)


def limits_of(settings: LoadSettings) -> Slo:
    """What the search is about; raises LoadTestError if there is none."""
    if settings.limits is None:
        raise LoadTestError("--find-max-rate needs --slo, as ttft=0.5,tpot=0.05")
    return settings.limits


def _shares(run: RequestColumns, settings: LoadSettings) -> tuple[float, float]:
    """Of the judged requests those that kept every limit, and the same of those in the last third of all."""
    good = kept(run, limits_of(settings))
    if good is None:
        raise LoadTestError("--slo: an ITL limit needs the inter-token latencies: leave out --no-keep-itl")
    judged = (run.index >= first_judged(settings, len(run))) & is_within(run.due_s, judged_span(settings))
    whole = _share(good, judged)
    last = judged & (np.arange(len(run)) >= len(run) * 2 // 3)
    return whole, _share(good, last) if last.any() else whole


def _share(good: Rows, rows: Rows) -> float:
    return float(good[rows].mean()) if rows.any() else 0.0


def _window(run: RequestColumns, settings: LoadSettings) -> Window | None:
    """As of any run, but of `--window all` too."""
    return parse_window(settings.window) or steady_window(run, settings.warm_up_s)
