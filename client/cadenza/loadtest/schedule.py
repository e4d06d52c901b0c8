"""The schedule: which request is due when, fixed before the run by the settings and a seed; and what of it counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from cadenza.loadtest.arrivals import make_arrivals
from cadenza.loadtest.columns import RequestColumns
from cadenza.loadtest.latencies import Window
from cadenza.loadtest.rate_trial import FIRST_RATE
from cadenza.loadtest.requests import LoadTestError, RequestShape
from cadenza.loadtest.settings import LoadSettings, changed, parse_window
from cadenza.loadtest.windows import steady_window
from cadenza.loadtest.workloads import make_workload

DEFAULT_REQUESTS = 100
ScheduledRequest = tuple[float, RequestShape]
"""Due time in seconds from the start, and the request. A session's later turns carry their first turn's time."""


def make_schedule(settings: LoadSettings, seed: int) -> Iterator[ScheduledRequest]:
    """Requests in the order of their due times, made as they are asked for; the same ones for the same seed.

    Closed loops have no due times: all are 0. Raises LoadTestError for a trace without timestamps, or out of order.
    """
    shapes = make_workload(settings).shapes(_count(settings), seed)
    times = _trace(shapes) if settings.arrivals == "trace" else _process(shapes, settings, seed)
    for due_s, shape in times:
        if settings.duration_s is not None and due_s > settings.duration_s:
            return
        yield due_s, shape


def planned_points(settings: LoadSettings) -> list[tuple[LoadSettings, dict[str, str]]]:
    """The settings of every point, and what is swept in it; all are looked at before a server is asked for anything.

    Raises LoadTestError for a sweep or a workload that cannot be, and as `check_schedule` does.
    """
    points = [(changed(settings, swept), swept) for swept in settings.points]
    for point, _ in points:
        if point.find_max_rate and math.isinf(point.request_rate):
            point = point.model_copy(update={"request_rate": FIRST_RATE})  # it is to be found
        check_schedule(point, make_schedule(point, point.seed))
    return points


def check_schedule(settings: LoadSettings, schedule: Iterable[ScheduledRequest]) -> None:
    """Is there something to send, and is something of it to count; raises LoadTestError. Reads as far as it must."""
    window, last_s = parse_window(settings.window), None
    first_s, end_s = window or (math.nextafter(settings.warm_up_s, math.inf), math.inf)
    for last_s, shape in schedule:
        # Closed loops have no due times, and a session's later turns come when they come.
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
            f"--warm-up-s {settings.warm_up_s:g} leaves nothing: the last request is due at {last_s:.3g} s"
        )


def truncated_to(settings: LoadSettings, max_model_len: int | None) -> LoadSettings:
    """Made-up requests are cut to what the model takes; what a file asks for is sent as it is."""
    if settings.from_file or max_model_len is None:
        return settings
    longest = min(settings.max_total_len or max_model_len, max_model_len)
    return settings.model_copy(update={"max_total_len": longest})


def window_of(settings: LoadSettings, columns: RequestColumns) -> Window | None:
    """What of a run counts, in seconds; None: all of it."""
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
                raise LoadTestError(f"--arrivals trace: request {shape.index} comes before the one ahead of it")
            before = shape.due_s
        yield before, shape
