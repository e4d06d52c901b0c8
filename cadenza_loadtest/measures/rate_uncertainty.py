"""Uncertainty of a single run's rates: a bootstrap over blocks of its time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import stats

from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.latencies import Window, arrivals_by_gaps, end_of, is_within, per_request
from cadenza_loadtest.measures.metrics import Metrics
from cadenza_loadtest.measures.slo import kept
from cadenza_loadtest.requests import Floats

FEWEST_BLOCKS = 10
"""Minimum number of time blocks, each as long as a mean request; shorter runs have no interval for a rate."""
_MOST_BLOCKS = 64


def rate_replicates(
    columns: RequestColumns, metrics: Metrics, *, seed: int, num_resamples: int, level: float
) -> dict[str, tuple[Floats, int]]:
    """By flat name: [num_resamples] replicates of each rate of the run, and their number of blocks.

    The window (without one, the run to its last token) is divided into blocks of equal length, no shorter than the mean
    E2E of its requests, and the arrivals in each block are counted; the blocks are drawn with replacement. Few blocks
    underestimate the variation, so the replicates are widened by the ratio of Student's t to the normal distribution at
    `level`. A rate with fewer than `FEWEST_BLOCKS` blocks, or without arrivals, is left out.

    The replicates show the variation within the run, including random arrivals; not the variation between runs. Two
    runs of one seed have the same arrivals, which the bootstrap does not know: then it is too wide. Effects that last
    longer than a block (a slow drift, a growing queue) make it too narrow.
    """
    over = metrics.window_s or (0.0, end_of(columns))
    e2e_s = per_request(columns)["e2e_s"][columns.ok & is_within(columns.due_s, metrics.window_s)]
    e2e_s = e2e_s[~np.isnan(e2e_s)]
    if not len(e2e_s) or not over[1] > over[0]:
        return {}
    longest = max(float(e2e_s.mean()), (over[1] - over[0]) / _MOST_BLOCKS)
    num_blocks = int((over[1] - over[0]) / longest)
    if num_blocks < FEWEST_BLOCKS:
        return {}
    drawn = np.random.default_rng(seed).integers(num_blocks, size=(num_resamples, num_blocks))
    wider = _widening(num_blocks, level)
    found = {}
    for name, counts in _counts(columns, metrics, over, num_blocks).items():
        value = getattr(metrics, name)
        if value and counts.sum() > 0:
            shares = counts[drawn].mean(axis=1) / counts.mean()
            found[name] = (value * np.maximum(0.0, 1 + wider * (shares - 1)), num_blocks)
    return found


def _widening(num_blocks: int, level: float) -> float:
    """Factor by which the bootstrap underestimates deviations of the mean with this few blocks (Hesterberg 2015,
    https://doi.org/10.1080/00031305.2015.1089789)."""
    mark = (1 + level) / 2
    return float((num_blocks / (num_blocks - 1)) ** 0.5 * stats.t.ppf(mark, num_blocks - 1) / stats.norm.ppf(mark))


def _counts(columns: RequestColumns, metrics: Metrics, over: Window, num_blocks: int) -> dict[str, Floats]:
    """[num_blocks] by rate: number of its requests or tokens that arrived in each block."""

    def count(times_s: Floats, weights: npt.NDArray[np.generic] | None = None) -> Floats:
        return np.histogram(times_s, num_blocks, over, weights=weights)[0].astype(float)

    found = {"requests_per_s": count(columns.last_s[columns.ok])}
    good = None if metrics.slo is None else kept(columns, metrics.slo)
    if good is not None:
        found["goodput_per_s"] = count(columns.last_s[columns.ok & good])
    read = ~np.isnan(columns.first_s)
    found["prompt_tokens_per_s"] = count(columns.first_s[read], columns.num_prompt_tokens[read])
    arrived = (columns.num_output_tokens > 0) & read
    found["output_tokens_per_s"] = count(*arrivals_by_gaps(columns, arrived)) + _evenly(
        columns, arrived & (columns.num_gaps == 0), np.linspace(*over, num_blocks + 1)
    )
    return found


def _evenly(columns: RequestColumns, rows: npt.NDArray[np.bool_], edges: Floats) -> Floats:
    """[edges - 1] output tokens of requests without gaps, spread from the first token to the last."""
    first_s, tokens = columns.first_s[rows], columns.num_output_tokens[rows]
    # An answer in one message arrived at one time.
    span_s = np.maximum(np.nan_to_num(columns.last_s[rows] - first_s), 1e-9)
    until = [float((tokens * np.clip((edge - first_s) / span_s, 0, 1)).sum()) for edge in edges]
    return np.diff(np.array(until))
