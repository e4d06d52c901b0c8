"""Confidence intervals: Student's t over repetitions, or a block bootstrap over the requests of a single run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict
from scipy import stats

from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.latencies import Rows, gaps_of, is_within, per_request
from cadenza_loadtest.measures.metric_names import values_of
from cadenza_loadtest.measures.metrics import LATENCIES, PERCENTILES, Metrics
from cadenza_loadtest.measures.rate_uncertainty import FEWEST_BLOCKS, rate_replicates
from cadenza_loadtest.measures.slo import kept
from cadenza_loadtest.requests import Floats, Ints

LEVEL = 0.95
"""Confidence level of the intervals in result files, tables and reports."""
RESAMPLES = 1000
STATISTICS = ("mean", *PERCENTILES)
_MIN_BLOCKS, _MAX_BLOCKS, _MAX_BINS = 20, 512, 2048
RATES = ("requests_per_s", "goodput_per_s", "output_tokens_per_s", "prompt_tokens_per_s")
_GROUP_LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")


class Estimate(BaseModel):
    """A value and its interval at `LEVEL`; without an interval `low` and `high` are None.

    how: "repetitions": the mean over n runs, with Student's t. "bootstrap": one run, over n values, or n blocks of time
    for a rate. "jeffreys": one run, a share of n values of which all or none count. "single": no interval is known, for
    example of a maximum.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    value: float
    low: float | None = None
    high: float | None = None
    n: int
    how: Literal["repetitions", "bootstrap", "jeffreys", "single"]


Replicates = dict[str, tuple[Floats, int, Literal["bootstrap", "jeffreys"]]]
"""By flat name: the metric's `RESAMPLES` replicates, the number of values, and the method."""


def interval_of_means(values: Sequence[float] | Floats, level: float = LEVEL) -> Estimate:
    """The mean of independent runs' values [n], with Student's t interval; no interval for n = 1. ValueError for n =
    0."""
    numbers = np.asarray(values, float)
    n = len(numbers)
    if n == 0:
        raise ValueError("a mean needs at least one value")
    mean = float(numbers.mean())
    if n == 1:
        return Estimate(value=mean, n=1, how="single")
    half = float(stats.t.ppf((1 + level) / 2, n - 1) * numbers.std(ddof=1) / math.sqrt(n))
    return Estimate(value=mean, low=mean - half, high=mean + half, n=n, how="repetitions")


def resample(
    values: npt.NDArray[np.floating], blocks: Ints, *, seed: int, statistics: Collection[str] = STATISTICS
) -> dict[str, Floats]:
    """[RESAMPLES] replicates of the mean and of percentiles of the values [n]; whole `blocks` [n] are drawn.

    Blocks of successive values, because requests in one queue are correlated: the non-overlapping block bootstrap
    (Carlstein 1986, https://doi.org/10.1214/aos/1176350057). Correlation beyond a block still makes intervals too
    narrow: repetitions are more reliable. Memory does not grow with the number of resamplings times n.

    The blocks' histograms are resampled, over the values themselves or, for many values, over bins that are finer
    towards the upper tail; within a bin, values are assumed to be evenly spread.
    """
    num_blocks = int(blocks.max()) + 1
    drawn = np.random.default_rng(seed).integers(num_blocks, size=(RESAMPLES, num_blocks))
    drawn += np.arange(RESAMPLES)[:, None] * num_blocks
    weights = np.bincount(drawn.ravel(), minlength=RESAMPLES * num_blocks).reshape(RESAMPLES, num_blocks).astype(float)
    found = {}
    if "mean" in statistics:
        sums = np.bincount(blocks, values, minlength=num_blocks)
        found["mean"] = (weights @ sums) / (weights @ np.bincount(blocks, minlength=num_blocks))
    shares = {name: share for name, share in PERCENTILES.items() if name in statistics}
    if shares:
        found.update(_percentiles(values, blocks, weights, shares))
    return found


def _percentiles(
    values: npt.NDArray[np.floating], blocks: Ints, weights: Floats, shares: Mapping[str, float]
) -> dict[str, Floats]:
    """[r] percentiles of each share, of resamples that hold each block `weights` [r, blocks] times."""
    order = np.argsort(values)
    ordered = values[order]
    starts = _bin_starts(len(values))
    bins = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(values))))
    cells = np.bincount(blocks[order] * len(starts) + bins, minlength=weights.shape[1] * len(starts))
    reached = np.cumsum(weights @ cells.reshape(weights.shape[1], len(starts)).astype(float), axis=1)
    highs = ordered[np.append(starts[1:], len(values)) - 1]
    ranks = _Ranks.of(reached, ordered[starts].astype(np.float64), highs.astype(np.float64))
    last = reached[:, -1] - 1
    found = {}
    for name, share in shares.items():
        place = share * last
        below = np.floor(place)
        low, high = ranks.values_at(below), ranks.values_at(np.minimum(below + 1, last))
        found[name] = low + (place - below) * (high - low)
    return found


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Looks up order statistics in r sorted resamples, which are given by the counts in their bins."""

    ends: Floats
    """[r * bins] number of values up to the end of each bin; each row starts at its `shift`, after the previous row, so
    that one search finds the positions in all rows."""
    shift: Floats
    lows: Floats
    """[bins] smallest value of each bin; `highs`: largest."""
    highs: Floats

    @classmethod
    def of(cls, reached: Floats, lows: Floats, highs: Floats) -> _Ranks:
        shift = np.arange(len(reached)) * reached[:, -1].max()
        return cls((reached + shift[:, None]).ravel(), shift, lows, highs)

    def values_at(self, places: Floats) -> Floats:
        """[r] the values at these positions [r], each from 0 and less than its row's count."""
        found = np.searchsorted(self.ends, places + self.shift, "right")
        bins = found - np.arange(len(places)) * len(self.lows)
        before = np.where(bins > 0, self.ends[found - 1], self.shift)
        count = self.ends[found] - before
        part = np.where(count > 1, (places + self.shift - before) / np.maximum(count - 1, 1), 0.5)
        values: Floats = self.lows[bins] + part * (self.highs[bins] - self.lows[bins])
        return values


def has_interval(statistic: str, n: int, level: float = LEVEL) -> bool:
    """Whether n values are enough for an interval of the statistic.

    For a percentile p, the interval's upper end lies beyond all values with probability p^n, which must not exceed (1 -
    level) / 2. At 95% the median needs 6 values, p99 needs 368.
    """
    if statistic == "mean":
        return n > 1
    return statistic in PERCENTILES and PERCENTILES[statistic] ** n <= (1 - level) / 2


def why_unknown(name: str) -> str:
    """Why a single run's metric, by flat name, may have no interval, as the end of a sentence."""
    statistic = name.rpartition(".")[2]
    if statistic in PERCENTILES:
        return f"needs {math.ceil(math.log((1 - LEVEL) / 2) / math.log(PERCENTILES[statistic]))} values"
    if statistic == "max":
        return "a single run gives no interval for a maximum"
    if name in RATES:
        return f"the run is shorter than {FEWEST_BLOCKS} requests, or nothing arrived"
    return "a single run gives none"


def replicates_of(columns: RequestColumns, metrics: Metrics, *, seed: int = 0) -> Replicates:
    """Replicates of a run's metrics: of latencies and the SLO share from its requests, of rates from blocks of its
    time.

    Metrics without a known interval are left out. `metrics` must be those of the columns.
    """
    due = is_within(columns.due_s, metrics.window_s)
    found = _latencies(columns, due & columns.ok, [name for name in LATENCIES if name != "lag_s"], "", seed)
    # The lag covers failed requests, too.
    found.update(_latencies(columns, due, ["lag_s"], "", seed))
    for where, groups, names in (
        ("by_kind", metrics.by_kind, columns.kind),
        ("by_tenant", metrics.by_tenant, columns.tenant),
        ("by_adapter", metrics.by_adapter, columns.adapter),
    ):
        for group in groups:
            rows = due & columns.ok & (names == group)
            found.update(_latencies(columns, rows, _GROUP_LATENCIES, f"{where}.{group}.", seed))
    good = None if metrics.slo is None else kept(columns, metrics.slo)
    if good is not None and due.any():
        order = np.argsort(columns.due_s[due], kind="stable")
        shares, how = _shares(good[due][order], seed)
        found["slo_share"] = (shares, int(due.sum()), how)
    rates = rate_replicates(columns, metrics, seed=seed, num_resamples=RESAMPLES, level=LEVEL)
    found.update({name: (drawn, n, "bootstrap") for name, (drawn, n) in rates.items()})
    return found


def summarise(
    runs: Sequence[Metrics], columns: RequestColumns | None = None, *, seed: int = 0, level: float = LEVEL
) -> dict[str, Estimate]:
    """Estimates of all metrics by flat name: over several runs the mean and Student's t interval; for a single run its
    value and a bootstrap over its `columns`."""
    if len(runs) != 1:
        each = [values_of(run) for run in runs]
        names = dict.fromkeys(name for values in each for name in values)
        return {name: _clipped(name, interval_of_means([v[name] for v in each if name in v], level)) for name in names}
    replicates = {} if columns is None else replicates_of(columns, runs[0], seed=seed)
    found = {}
    for name, value in values_of(runs[0]).items():
        found[name] = Estimate(value=value, n=1, how="single")
        if name in replicates:
            drawn, n, how = replicates[name]
            found[name] = _estimate(value, drawn, n, how, "mean", level)
    return found


def interval(replicates: Floats, level: float = LEVEL) -> tuple[float, float]:
    """The percentile interval of replicates."""
    low, high = np.quantile(replicates, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _latencies(columns: RequestColumns, rows: Rows, names: Sequence[str], prefix: str, seed: int) -> Replicates:
    found: Replicates = {}
    latencies = per_request(columns)
    for name in names:
        values, blocks = _gap_series(columns, rows) if name == "itl_s" else _series(columns, latencies[name], rows)
        known = [statistic for statistic in STATISTICS if has_interval(statistic, len(values))]
        if known:
            for statistic, drawn in resample(values, blocks, seed=seed, statistics=known).items():
                found[f"{prefix}{name}.{statistic}"] = (drawn, len(values), "bootstrap")
    return found


def _series(columns: RequestColumns, values: Floats, rows: Rows) -> tuple[Floats, Ints]:
    """The known values in the order of due times, and their blocks."""
    rows = rows & ~np.isnan(values)
    ordered = values[rows][np.argsort(columns.due_s[rows], kind="stable")]
    return ordered, _blocks(len(ordered))


def _gap_series(columns: RequestColumns, rows: Rows) -> tuple[npt.NDArray[np.floating], Ints]:
    """The gaps of the requests, and their blocks: a request's gaps are correlated, so they are drawn together."""
    gaps = gaps_of(columns, rows)
    if not len(gaps):
        return gaps, np.zeros(0, np.int64)
    rows = rows & (columns.num_gaps > 0)
    place = np.empty(int(rows.sum()), np.int64)
    place[np.argsort(columns.due_s[rows], kind="stable")] = _blocks(len(place))
    return gaps, np.repeat(place, columns.num_gaps[rows])


def _shares(good: Rows, seed: int) -> tuple[Floats, Literal["bootstrap", "jeffreys"]]:
    """Replicates of the share of `good` [n]. If all or none are good, resampling would show no variation; then the
    replicates are from Jeffreys' posterior (Brown, Cai and DasGupta 2001, https://doi.org/10.1214/ss/1009213286)."""
    n, num_good = len(good), int(good.sum())
    if 0 < num_good < n:
        return resample(good.astype(float), _blocks(n), seed=seed, statistics=["mean"])["mean"], "bootstrap"
    levels = (np.arange(RESAMPLES) + 0.5) / RESAMPLES
    drawn = stats.beta.ppf(levels, num_good + 0.5, n - num_good + 0.5)
    return np.random.default_rng(seed).permutation(drawn), "jeffreys"


def _blocks(n: int) -> Ints:
    """[n] the block of each of n values in order; blocks have about n^(1/3) values: fewer if there would be too few
    blocks to draw from, more if there would be too many to store."""
    if not n:
        return np.zeros(0, np.int64)
    wanted = max(min(n, _MIN_BLOCKS), n // math.ceil(n ** (1 / 3)))
    blocks: Ints = np.arange(n) * max(1, min(wanted, _MAX_BLOCKS)) // n
    return blocks


def _bin_starts(n: int) -> Ints:
    """Start indices of the bins of n sorted values: one per value, or `_MAX_BINS` bins, half of them for the top
    tenth."""
    if n <= _MAX_BINS:
        return np.arange(n)
    half = _MAX_BINS // 2
    levels = np.concatenate([np.linspace(0, 0.9, half, endpoint=False), 1 - np.geomspace(0.1, 1 / n, half)])
    return np.unique((levels * n).astype(np.int64))


def _clipped(name: str, estimate: Estimate) -> Estimate:
    """The estimate with its interval clipped to possible values: counts and times from 0, shares up to 1."""
    if estimate.low is None or estimate.high is None or estimate.value < 0:
        return estimate
    most = 1.0 if name.endswith(("_share", "_kv_use")) else math.inf
    return estimate.model_copy(update={"low": max(estimate.low, 0.0), "high": min(estimate.high, most)})


def _estimate(
    value: float,
    drawn: Floats,
    n: int,
    how: Literal["bootstrap", "jeffreys"],
    statistic: str,
    level: float,
) -> Estimate:
    if not has_interval(statistic, n, level):
        return Estimate(value=value, n=n, how="single")
    low, high = interval(drawn, level)
    return Estimate(value=value, low=low, high=high, n=n, how=how)
