"""The formulas: latencies of each request, tokens and requests within a window, requests in flight. Pure numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cadenza.loadtest.columns import RequestColumns
from cadenza.loadtest.requests import Floats

Window = tuple[float, float]
"""From and to, in seconds of the run; both ends belong to it."""
Rows = npt.NDArray[np.bool_]

PER_REQUEST = ("ttft_s", "tpot_s", "e2e_s", "queue_s", "lag_s")
"""Latencies that a request has one of; of inter-token latencies it has many."""


def per_request(columns: RequestColumns) -> dict[str, Floats]:
    """[n] seconds each, NaN where there is none; a request's clock starts when it was due.

    - ttft_s: first token - due; e2e_s: last token - due; lag_s: sent - due; queue_s: as the server says.
    - tpot_s: (last - first token) / (tokens of a sample - 1), of requests with more than one token a sample. That of an
      answer that comes in one piece, as beams do, is not known.
    """
    further, span = _tokens_per_sample(columns) - 1, columns.last_s - columns.first_s
    tpot_s = np.full(len(columns), np.nan)
    np.divide(span, further, out=tpot_s, where=(further > 0) & (span > 0))
    return {
        "ttft_s": columns.first_s - columns.due_s,
        "tpot_s": tpot_s,
        "e2e_s": columns.last_s - columns.due_s,
        "queue_s": columns.queue_s,
        "lag_s": columns.sent_s - columns.due_s,
    }


def gaps_of(columns: RequestColumns, rows: Rows) -> npt.NDArray[np.float32]:
    """The inter-token latencies of the requests `rows` [n], one request's after the other's."""
    if not len(columns.gap_s):
        return columns.gap_s
    return columns.gap_s[np.repeat(rows, columns.num_gaps)]


def longest_gap_s(columns: RequestColumns) -> Floats | None:
    """[n] the longest inter-token latency of each request, NaN where it has none; None if they were not kept."""
    if not len(columns.gap_s):
        streamed = columns.ok & (columns.last_s > columns.first_s)
        return None if streamed.any() else np.full(len(columns), np.nan)
    longest = np.full(len(columns), np.nan)
    with_gaps = columns.num_gaps > 0
    starts = (np.cumsum(columns.num_gaps) - columns.num_gaps)[with_gaps]
    longest[with_gaps] = np.maximum.reduceat(columns.gap_s, starts)
    return longest


def is_within(times_s: Floats, window: Window | None) -> Rows:
    """[n] whether each time is within the window; NaN is not. Without a window, all are."""
    if window is None:
        return np.ones(len(times_s), bool)
    return (times_s >= window[0]) & (times_s <= window[1])


def end_of(columns: RequestColumns) -> float:
    """Time of the last token of all, in seconds; 0 without any."""
    known = columns.last_s[~np.isnan(columns.last_s)]
    return float(known.max()) if len(known) else 0.0


def tokens_within(columns: RequestColumns, window: Window) -> float:
    """Output tokens that arrived within the window, of failed requests too.

    A request's tokens are spread over its messages in equal parts; where its gaps were not kept, over times from the
    first token to the last that are equally far from each other, one for each token of a sample.
    """
    arrived = (columns.num_output_tokens > 0) & ~np.isnan(columns.first_s)
    times_s, shares = arrivals_by_gaps(columns, arrived)
    by_gaps = float(shares[is_within(times_s, window)].sum())
    return by_gaps + _evenly(columns, arrived & (columns.num_gaps == 0), window)


def arrivals_by_gaps(columns: RequestColumns, rows: Rows) -> tuple[Floats, Floats]:
    """[messages] when each message of the requests `rows` [n] came whose gaps were kept, and its part of the tokens."""
    with_gaps = rows & (columns.num_gaps > 0)
    if not with_gaps.any():
        return np.zeros(0), np.zeros(0)
    num_gaps, first_s = columns.num_gaps[with_gaps], columns.first_s[with_gaps]
    share = columns.num_output_tokens[with_gaps] / (num_gaps + 1)
    passed = np.cumsum(gaps_of(columns, with_gaps), dtype=np.float64)
    before = np.concatenate([[0.0], passed[np.cumsum(num_gaps)[:-1] - 1]])
    later_s = passed + np.repeat(first_s - before, num_gaps)
    return np.concatenate([first_s, later_s]), np.concatenate([share, np.repeat(share, num_gaps)])


def in_flight(columns: RequestColumns, window: Window) -> tuple[float, int]:
    """Mean and greatest number of requests between due and last token, within the window.

    A request that failed counts up to its last token, without one up to when it was sent.
    """
    start, end = window
    if not end > start:
        return 0.0, 0
    known = ~np.isnan(columns.due_s)
    begins = columns.due_s[known]
    ends = np.where(np.isnan(columns.last_s), columns.sent_s, columns.last_s)[known]
    ends = np.fmax(ends, begins)
    mean = float((np.clip(ends, start, end) - np.clip(begins, start, end)).sum() / (end - start))
    begins, ends = np.sort(begins), np.sort(ends)
    moments = np.append(begins[is_within(begins, window)], start)
    # One that ends when another begins has left: else a closed loop of N users would seem to have N + 1.
    counts = np.searchsorted(begins, moments, "right") - np.searchsorted(ends, moments, "right")
    return mean, int(counts.max())


def _tokens_per_sample(columns: RequestColumns) -> Floats:
    return columns.num_output_tokens / np.maximum(columns.num_samples, 1)


def _evenly(columns: RequestColumns, rows: Rows, window: Window) -> float:
    first_s, tokens = columns.first_s[rows], columns.num_output_tokens[rows]
    times = np.maximum(np.round(_tokens_per_sample(columns)[rows]), 1)
    span = np.nan_to_num(columns.last_s[rows] - first_s)
    inside = is_within(first_s, window) * times
    apart = (span > 0) & (times > 1)
    step = span[apart] / (times[apart] - 1)
    # The places of the tokens, 0 to times - 1, that lie within; a little slack, as the ends belong to the window.
    low = np.maximum(np.ceil((window[0] - first_s[apart]) / step - 1e-6), 0)
    high = np.minimum(np.floor((window[1] - first_s[apart]) / step + 1e-6), times[apart] - 1)
    inside[apart] = np.maximum(high - low + 1, 0)
    return float((tokens / times * inside).sum())
