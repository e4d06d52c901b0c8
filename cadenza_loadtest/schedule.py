"""The schedule: the due time of each request, fixed before the run by the settings and a seed; and the window that
counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from cadenza_loadtest.arrivals import make_arrivals
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.latencies import Window
from cadenza_loadtest.measures.windows import steady_window
from cadenza_loadtest.rate_trial import FIRST_RATE
from cadenza_loadtest.requests import LoadTestError, RequestShape
from cadenza_loadtest.settings import LoadSettings, changed, parse_window
from cadenza_loadtest.workloads.workloads import make_workload

DEFAULT_REQUESTS = 100
ScheduledRequest = tuple[float, RequestShape]
"""Due time in seconds from the start, and the request. A session's later turns carry their first turn's time."""


def make_schedule(settings: LoadSettings, seed: int) -> Iterator[ScheduledRequest]:
    """Requests in the order of their due times, made lazily; they depend on the settings and the seed alone.

    Closed loops have no due times: all are 0. Raises LoadTestError for a trace without timestamps, or out of order.
    """
    shapes = make_workload(settings).shapes(_count(settings), seed)
    times = _trace(shapes) if settings.arrivals == "trace" else _process(shapes, settings, seed)
    for due_s, shape in times:
        if settings.duration_s is not None and due_s > settings.duration_s:
            return
        yield due_s, shape


def planned_points(settings: LoadSettings) -> list[tuple[LoadSettings, dict[str, str]]]:
    """The settings of every point, and its swept values; all points are checked before any request is sent.

    Raises LoadTestError for an invalid sweep or workload, and as `check_schedule` does.
    """
    points = [(changed(settings, swept), swept) for swept in settings.points]
    for point, _ in points:
        if point.find_max_rate and math.isinf(point.request_rate):
            point = point.model_copy(update={"request_rate": FIRST_RATE})  # the search sets the rate
        check_schedule(point, make_schedule(point, point.seed))
    return points


def check_schedule(settings: LoadSettings, schedule: Iterable[ScheduledRequest]) -> None:
    """Raises LoadTestError if there is nothing to send, or nothing of it counts. Reads only as far as needed."""
    window, last_s = parse_window(settings.window), None
    first_s, end_s = window or (math.nextafter(settings.warm_up_s, math.inf), math.inf)
    for last_s, shape in schedule:
        # Closed loops have no due times, and the due times of a session's later turns are not known yet.
        if settings.window == "all" or settings.concurrency is not None or shape.session >= 0:
            return
        if first_s <= last_s <= end_s:
            return
    if last_s is None:
        raise LoadTestError("there is nothing to send: no request of the workload is due within --duration-s")
    if window is not None:
        raise LoadTestError(
            f"--window {settings.window}: no request is due within it; the last one is at {last_s:.3g} s"
        )
    if last_s > 0:
        raise LoadTestError(
            f"--warm-up-s {settings.warm_up_s:g} leaves no request: the last one is due at {last_s:.3g} s"
        )


def truncated_to(settings: LoadSettings, max_model_len: int | None) -> LoadSettings:
    """The settings with synthetic requests truncated to the model's limit; requests of a file are sent unchanged."""
    if settings.from_file or max_model_len is None:
        return settings
    longest = min(settings.max_total_len or max_model_len, max_model_len)
    return settings.model_copy(update={"max_total_len": longest})


def window_of(settings: LoadSettings, columns: RequestColumns) -> Window | None:
    """The window of a run that counts, in seconds; None: the whole run."""
    given = parse_window(settings.window)
    if given is not None or settings.window == "all" or settings.concurrency is not None:
        return given
    return steady_window(columns, settings.warm_up_s)


def _count(settings: LoadSettings) -> int | None:
    if settings.num_requests is None and not settings.from_file and settings.duration_s is None:
        return DEFAULT_REQUESTS
    return settings.num_requests


def _process(shapes: Iterator[RequestShape], settings: LoadSettings, seed: int) -> Iterator[ScheduledRequest]:
    arrivals = make_arrivals(settings.arrivals, settings.request_rate, burstiness=settings.burstiness)
    times = arrivals.times(seed)
    due_s = 0.0
    for shape in shapes:
        if shape.turn == 0:
            due_s = next(times)
        yield due_s, shape


def _trace(shapes: Iterator[RequestShape]) -> Iterator[ScheduledRequest]:
    before = 0.0
    for shape in shapes:
        if shape.turn == 0:
            if shape.due_s is None:
                raise LoadTestError(f"--arrivals trace: request {shape.index} of the workload has no timestamp")
            if shape.due_s < before:
                raise LoadTestError(
                    f"--arrivals trace: request {shape.index} has an earlier timestamp than the request before it"
                )
            before = shape.due_s
        yield before, shape
