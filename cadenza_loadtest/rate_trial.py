"""A trial of the search for the highest rate, on a server or simulated: its settings, and whether its rate holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.latencies import Rows, Window, is_within
from cadenza_loadtest.measures.slo import Slo, kept
from cadenza_loadtest.measures.windows import kept_up, steady_window
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.settings import LoadSettings, parse_window

FIRST_RATE = 1.0
"""Default start of the search, in requests per second."""
_WARM_UP_SHARE = 0.1
"""Share of the requests that are not judged: the first ones find an empty system."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of a trial."""

    held: bool
    share: float
    """Share of the judged requests that kept every limit: the mean over the runs."""
    kept_up: bool
    """Whether about as many requests ended as arrived in the second half of the arrivals of every run."""


def at_rate(settings: LoadSettings, rate: float, *, seconds: float, num_requests: int) -> LoadSettings:
    """A trial's settings, with the number of requests or the duration that `settings` give; else the whole file; else
    arrivals for `seconds`, at least `num_requests`.

    All rates have the same requests in the same pattern of arrivals, stretched, so that a lower rate is not worse by
    chance.
    """
    change: dict[str, float | int | None] = {"request_rate": rate}
    if settings.num_requests is None and not settings.from_file:
        fewest, lasting = (num_requests, seconds) if settings.duration_s is None else (1, settings.duration_s)
        change |= {"num_requests": max(fewest, math.ceil(rate * lasting)), "duration_s": None}
    return settings.model_copy(update=change)


def judge(runs: Sequence[RequestColumns], settings: LoadSettings) -> Judgement:
    """Decide whether the rate of these runs, one or more, holds. It does if

    - `settings.slo_share` of the requests keep `settings.slo`, over the run without its first tenth and over its last
      third alone (the means over all runs), and
    - the server keeps up: in every run, about as many requests end as arrive in the second half of the arrivals.

    Raises LoadTestError if there is no SLO, or an ITL limit without inter-token latencies.
    """
    wholes, ends = zip(*(_shares(run, settings) for run in runs), strict=True)
    keeps_up = all(kept_up(run, _window(run, settings)) is not False for run in runs)
    share = float(np.mean(wholes))
    held = keeps_up and min(share, float(np.mean(ends))) >= settings.slo_share
    return Judgement(held, share, keeps_up)


def first_judged(settings: LoadSettings, num_requests: int) -> int:
    """Index of the first of `num_requests` requests that is judged; 0 with the user's own window, which decides
    alone."""
    return 0 if parse_window(settings.window) else int(_WARM_UP_SHARE * num_requests)


def judged_span(settings: LoadSettings) -> Window:
    """The due times of judged requests, in seconds of the run."""
    return parse_window(settings.window) or (settings.warm_up_s, math.inf)


def limits_of(settings: LoadSettings) -> Slo:
    """The SLO of the search; raises LoadTestError if there is none."""
    if settings.limits is None:
        raise LoadTestError("--find-max-rate needs --slo, as ttft=0.5,tpot=0.05")
    return settings.limits


def _shares(run: RequestColumns, settings: LoadSettings) -> tuple[float, float]:
    """Share of the judged requests that kept every limit, and the same share in the last third of all requests."""
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
    """The window as for any run, and also for `--window all`."""
    return parse_window(settings.window) or steady_window(run, settings.warm_up_s)
