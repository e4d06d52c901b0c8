"""Formulas for latencies per request, tokens and requests within a window, and requests in flight. Pure numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.requests import Floats

Window = tuple[float, float]
"""Start and end in seconds of the run, both inclusive."""
Rows = npt.NDArray[np.bool_]

PER_REQUEST = ("ttft_s", "tpot_s", "e2e_s", "queue_s", "lag_s")
"""Latencies with one value per request; a request has many inter-token latencies."""


def per_request(columns: RequestColumns) -> dict[str, Floats]:
    """[n] seconds each, NaN: none; a request's clock starts when it was due.

    - ttft_s: first token - due; e2e_s: last token - due; lag_s: sent - due; queue_s: as the server reports. - tpot_s:
      (last - first token) / (tokens of a sample - 1), for requests with more than one token per sample. It is not known
      for an answer that arrives in one message, as beams do.
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
    """The inter-token latencies of the requests `rows` [n], one request after the other."""
    if not len(columns.gap_s):
        return columns.gap_s
    return columns.gap_s[np.repeat(rows, columns.num_gaps)]


def longest_gap_s(columns: RequestColumns) -> Floats | None:
    """[n] the longest inter-token latency of each request, NaN if it has none; None if they were not kept."""
    if not len(columns.gap_s):
        streamed = columns.ok & (columns.last_s > columns.first_s)
        return None if streamed.any() else np.full(len(columns), np.nan)
    longest = np.full(len(columns), np.nan)
    with_gaps = columns.num_gaps > 0
    starts = (np.cumsum(columns.num_gaps) - columns.num_gaps)[with_gaps]
    longest[with_gaps] = np.maximum.reduceat(columns.gap_s, starts)
    return longest


def is_within(times_s: Floats, window: Window | None) -> Rows:
    """[n] whether each time is within the window; NaN is not. Without a window, all times are."""
    if window is None:
        return np.ones(len(times_s), bool)
    return (times_s >= window[0]) & (times_s <= window[1])


def end_of(columns: RequestColumns) -> float:
    """Time of the run's last token, in seconds; 0 without tokens."""
    known = columns.last_s[~np.isnan(columns.last_s)]
    return float(known.max()) if len(known) else 0.0


def tokens_within(columns: RequestColumns, window: Window) -> float:
    """Output tokens that arrived within the window, including those of failed requests.

    A request's tokens are spread evenly over its messages. If its gaps were not kept, they are spread over evenly
    spaced times from the first token to the last, one for each token of a sample.
    """
    arrived = (columns.num_output_tokens > 0) & ~np.isnan(columns.first_s)
    times_s, shares = arrivals_by_gaps(columns, arrived)
    by_gaps = float(shares[is_within(times_s, window)].sum())
    return by_gaps + _evenly(columns, arrived & (columns.num_gaps == 0), window)


def arrivals_by_gaps(columns: RequestColumns, rows: Rows) -> tuple[Floats, Floats]:
    """[messages] arrival time and number of tokens of each message of the requests `rows` [n] whose gaps were kept."""
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
    """Mean and maximum number of requests between due and last token, within the window.

    A failed request counts until its last token or, without one, until it was sent.
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
    # A request that ends when another begins does not count any more: else a closed loop of N users would have N + 1.
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
    # Indices of the tokens within the window, 0 to times - 1; with some slack, because the window includes its ends.
    low = np.maximum(np.ceil((window[0] - first_s[apart]) / step - 1e-6), 0)
    high = np.minimum(np.floor((window[1] - first_s[apart]) / step + 1e-6), times[apart] - 1)
    inside[apart] = np.maximum(high - low + 1, 0)
    return float((tokens / times * inside).sum())
