"""Figures of latencies: their distributions, and their course over the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cadenza_loadtest.figures.style import (
    FAILED,
    INK,
    MUTED,
    SHADE,
    Look,
    line_handle,
    look,
    new_figure,
    put_legend,
    say,
    styled,
)
from cadenza_loadtest.figures.thinning import RunningQuantiles, cdf_points, running
from cadenza_loadtest.figures.ticks import clock_unit, seconds_unit, set_scale, wants_log
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.latencies import Window, gaps_of, is_within, per_request
from cadenza_loadtest.requests import Floats

_NEAR = 2.0
"""An SLO this many times above the data is left out of a linear axis, because it would flatten the curves."""
_MANY_DOTS = 500
"""More dots than this are rasterized within the SVG."""
_DENSE_DOTS = 4000
"""Above this number, dots become fainter with their number, so that density and the lines over them stay visible."""
SHORT = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E"}
TITLES = {"ttft_s": "Time to first token", "tpot_s": "Time per output token", "itl_s": "Inter-token latency",
          "e2e_s": "End to end"}  # fmt: skip
"""The drawn latencies and the titles of their panels."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A series of the latency figures, in seconds; [n] each except `itl_s`."""

    label: str
    due_s: Floats
    """When each request was due, in seconds of the run."""
    latencies: dict[str, npt.NDArray[np.floating]]
    """ttft_s, tpot_s and e2e_s of each request (NaN: none), itl_s of each message."""
    failed_due_s: Floats
    """When the requests that failed were due."""
    window: Window | None = None
    """The window that counts; CDFs show nothing outside it."""
    look: Look | None = None
    """None: chosen by the position among the series."""


def sample_of(label: str, columns: RequestColumns, window: Window | None, look: Look | None = None) -> Sample:
    """The latencies of the completed requests, and the due times of the failed ones."""
    rows = columns.ok
    counted = rows & is_within(columns.due_s, window)
    found: dict[str, npt.NDArray[np.floating]] = {
        name: values[rows] for name, values in per_request(columns).items() if name in TITLES
    }
    return Sample(
        label, columns.due_s[rows], {**found, "itl_s": gaps_of(columns, counted)}, columns.due_s[~rows], window, look
    )


def within_window(sample: Sample, name: str) -> npt.NDArray[np.floating]:
    """The values of a latency that count, without NaN."""
    values = sample.latencies[name]
    if name != "itl_s":
        values = values[is_within(sample.due_s, sample.window)]
    known: npt.NDArray[np.floating] = values[~np.isnan(values)]
    return known


@styled()
def latency_cdfs(samples: Sequence[Sample], limits: Mapping[str, float] | None = None) -> Figure:
    """A CDF panel for each latency. `limits`: the SLO's limits in seconds, by name."""
    limits = limits or {}
    figure, panels = new_figure("Latency distributions", rows=2, columns=2, height=5.6)
    drawn: set[int] = set()
    has_limit = False
    for axes, name in zip(panels, TITLES, strict=True):
        drawn |= _cdf(axes, samples, name, limits.get(name))
        has_limit |= any(line.get_label() == "SLO" for line in axes.lines)
    handles: list[Artist] = [
        line_handle(sample.label, _look(samples, place).colour, linestyle=_look(samples, place).line)
        for place, sample in enumerate(samples)
        if place in drawn
    ]
    if has_limit:
        handles.append(line_handle("SLO", INK, linestyle=":"))
    if len(handles) > 1:
        put_legend(figure, handles)
    return figure


def _look(samples: Sequence[Sample], place: int) -> Look:
    return samples[place].look or look(place)


def _cdf(axes: Axes, samples: Sequence[Sample], name: str, limit: float | None) -> set[int]:
    """Draw a panel; returns the indices of the samples that have values in it."""
    axes.set_title(TITLES[name])
    values = [within_window(sample, name) for sample in samples]
    shown = {place for place, each in enumerate(values) if len(each)}
    if not shown:
        say(axes, "Nothing was measured.")
        return shown
    unit, log = seconds_unit(values), wants_log(values)
    for place in sorted(shown):
        at, share = cdf_points(values[place])
        # Start at 0, so that a single value is visible.
        at, share = np.concatenate([at[:1], at]), np.concatenate([[0.0], share])
        if log:
            at = np.maximum(at, 1e-7)
        drawn = _look(samples, place)
        # Steps double the vertices and are invisible with many values.
        style = "steps-post" if len(values[place]) <= len(at) else "default"
        axes.plot(at * unit.factor, share, color=drawn.colour, linestyle=drawn.line, drawstyle=style)
    if limit is not None and (log or limit < _NEAR * max(float(values[place].max()) for place in shown)):
        axes.axvline(limit * unit.factor, color=INK, linestyle=":", linewidth=1.2, label="SLO")
    axes.set_ylim(0, 1.02)
    set_scale(axes, "x", log, most=5)
    set_scale(axes, "y", False, most=5)
    axes.set_xlabel(f"{SHORT[name]}, {unit.name}")
    axes.set_ylabel("share of " + ("messages" if name == "itl_s" else "requests"))
    return shown


@styled()
def latency_over_time(sample: Sample) -> Figure:
    """Each request's TTFT and E2E over its due time; failed requests are marked on the axis.

    If all were due at one time, the x axis is the order in which they were to be sent.
    """
    figure, panels = new_figure(f"Latency over the run: {sample.label}" if sample.label else "Latency over the run",
                                rows=2, height=5.2)  # fmt: skip
    due_s, failed_due_s, window = sample.due_s, sample.failed_due_s, sample.window
    unit = clock_unit([due_s, failed_due_s])
    label = f"due, {unit.name} since the start"
    if len(due_s) > 1 and due_s.min() == due_s.max():
        due_s, failed_due_s, window = np.arange(1.0, len(due_s) + 1), failed_due_s[:0], None
        label = f"completed request, in order; all were due at {sample.due_s[0]:g} s"
    factor = unit.factor if due_s is sample.due_s else 1.0
    ran: RunningQuantiles | None = None
    for axes, name in zip(panels, ("ttft_s", "e2e_s"), strict=True):
        axes.set_title(TITLES[name])
        values = sample.latencies[name].astype(np.float64)
        if not np.isfinite(values).any():
            say(axes, "No request completed.")
            continue
        if window is not None:
            axes.axvspan(window[0] * factor, window[1] * factor, color=SHADE, zorder=0)
        ran = running(due_s, values)
        _dots(axes, due_s * factor, values, ran, factor)
        _put_failed(axes, failed_due_s * factor)
        axes.set_ylabel(f"{SHORT[name]}, {seconds_unit([values]).name}")
        axes.set_xlabel(label)
    if any(axes.axison for axes in panels):
        put_legend(figure, _handles(ran, len(failed_due_s)))
    return figure


def _handles(ran: RunningQuantiles | None, num_failed: int) -> list[Artist]:
    handles: list[Artist] = [line_handle("request", look(0).colour, linestyle="", marker="o", markersize=3)]
    if ran is not None:
        handles.append(line_handle(f"median of {ran.width:,} neighbours", INK))
        handles.append(line_handle(f"p{ran.tail_percent} of them", MUTED, linestyle="--"))
    if num_failed:
        handles.append(line_handle(f"failed ({num_failed:,})", FAILED, linestyle="", marker="|", markersize=7))
    return handles


def _dots(axes: Axes, times: Floats, values: Floats, ran: RunningQuantiles | None, factor: float) -> None:
    unit, log = seconds_unit([values]), wants_log([values])
    many = len(values) > _MANY_DOTS
    axes.plot(
        times, values * unit.factor, color=look(0).colour, linestyle="", marker="o", rasterized=many,
        markersize=1.6 if len(values) > 5 * _DENSE_DOTS else 2.2 if len(values) > 300 else 3.2,
        alpha=max(0.03, 0.5 * min(1.0, (_DENSE_DOTS / len(values)) ** 0.6)), markeredgewidth=0,
    )  # fmt: skip
    if ran is not None:
        axes.plot(ran.at * factor, ran.median * unit.factor, color=INK)
        axes.plot(ran.at * factor, ran.tail * unit.factor, color=MUTED, linestyle="--")
    set_scale(axes, "x", False)
    set_scale(axes, "y", log, most=5)
    if not log:
        axes.set_ylim(bottom=0)


def _put_failed(axes: Axes, times: Floats) -> None:
    if len(times):
        style = {"linestyle": "", "marker": "|", "markersize": 7, "rasterized": len(times) > _MANY_DOTS}
        axes.plot(times, np.zeros(len(times)), color=FAILED, transform=axes.get_xaxis_transform(), clip_on=False,
                  **style)  # type: ignore[arg-type]  # fmt: skip
