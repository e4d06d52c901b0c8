"""Figures of a sweep's points: throughput against latency, metrics over the swept setting, offered and completed
load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cadenza_loadtest.figures.latency import SHORT
from cadenza_loadtest.figures.naming import Named, put_names
from cadenza_loadtest.figures.style import INK, MUTED, Look, line_handle, look, new_figure, put_legend, say, styled
from cadenza_loadtest.figures.ticks import seconds_unit, set_scale, wants_log
from cadenza_loadtest.measures.uncertainty import Estimate
from cadenza_loadtest.requests import Floats

_NEAR = 2.0
"""An SLO this many times above the data is left out, because it would flatten the curves."""
_LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
_MARGINS = (0.12, 0.14)
"""Margins beside and above the drawing for marks and names, as shares of its size."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points that a line joins, in order: the points of a file, or its points with some equal settings."""

    label: str
    names: list[str]
    """The name of each point, which is the swept value; empty if the label states it."""
    summaries: list[Mapping[str, Estimate]]
    swept: str = ""
    """The swept setting, if there is one and it is a number."""
    at: list[float] = field(default_factory=list)
    """The swept values, [points]; empty if they are not numbers."""
    own: Look | None = None
    """None: chosen by the position among the curves."""
    chosen: int | None = None
    """The point whose name has priority: the result of a search."""

    def values(self, name: str) -> Floats:
        """[points] values of a metric; NaN: not measured."""
        return np.array([each[name].value if name in each else np.nan for each in self.summaries], np.float64)

    def reach(self, name: str) -> Floats:
        """[2, points] distance of the 95% interval's ends below and above each value; 0: not known."""
        rows = []
        for each in self.summaries:
            found = each.get(name)
            known = found is not None and found.low is not None and found.high is not None
            rows.append((found.value - found.low, found.high - found.value) if known else (0.0, 0.0))  # type: ignore[union-attr, operator]
        return np.maximum(np.array(rows, np.float64).T, 0)


@dataclass(frozen=True, slots=True)
class _Across:
    """The quantity of an x axis."""

    label: str
    values: Callable[[Curve], Floats]
    log: bool = False


@styled()
def throughput_and_latency(curves: Sequence[Curve], limits: Mapping[str, float] | None = None) -> Figure:
    """p50 and p99 of each latency over the output throughput; points are labelled with the swept value."""
    figure, panels = new_figure("Throughput against latency", columns=3, height=3.3)
    across = _Across("output tokens/s", lambda curve: curve.values("output_tokens_per_s"))
    drawn = [_latency_panel(axes, curves, name, (limits or {}).get(name), across)
             for axes, name in zip(panels, _LATENCIES, strict=True)]  # fmt: skip
    _put_latency_legend(figure, curves, any(drawn))
    figure.draw_without_rendering()
    for axes, name in zip(panels, _LATENCIES, strict=True):
        _name_points(axes, curves, name)
    return figure


@styled()
def over_swept(curves: Sequence[Curve], limits: Mapping[str, float] | None = None) -> Figure | None:
    """Latencies and throughput over the swept number; None if not all curves have the same swept number."""
    if len({curve.swept for curve in curves}) != 1 or not all(curve.at for curve in curves):
        return None
    swept = curves[0].swept.replace("-", " ")
    figure, panels = new_figure(f"Latency and throughput over {swept}", rows=2, columns=2, height=5.2)
    across = _Across(
        f"{swept}, requests/s" if swept == "request rate" else swept,
        lambda curve: np.array(curve.at),
        wants_log([curve.at for curve in curves]) and min(min(curve.at) for curve in curves) > 0,
    )
    drawn = [_latency_panel(axes, curves, name, (limits or {}).get(name), across)
             for axes, name in zip(panels, _LATENCIES, strict=False)]  # fmt: skip
    panels[3].set_title("Throughput")
    for place, curve in enumerate(curves):
        _line(panels[3], curve, place, across, "output_tokens_per_s", 1.0)
    panels[3].margins(*_MARGINS)
    _set_axes(panels[3], across, False)
    panels[3].set_ylim(bottom=0)
    panels[3].set_ylabel("output tokens/s")
    _put_latency_legend(figure, curves, any(drawn))
    return figure


def _latency_panel(
    axes: Axes, curves: Sequence[Curve], name: str, limit: float | None, across: _Across
) -> bool:  # fmt: skip
    """Draw a panel; returns whether the limit is drawn."""
    axes.set_title(SHORT[name])
    found = [curve.values(f"{name}.{mark}") for curve in curves for mark in ("p50", "p99")]
    known = [each[np.isfinite(each)] for each in found if np.isfinite(each).any()]
    if not known:
        say(axes, "Nothing was measured.")
        return False
    unit, log = seconds_unit(known), wants_log(known)
    for place, curve in enumerate(curves):
        for mark in ("p50", "p99"):
            _line(axes, curve, place, across, f"{name}.{mark}", unit.factor)
    has_limit = limit is not None and (log or limit < _NEAR * max(each.max() for each in known))
    if has_limit and limit is not None:
        axes.axhline(limit * unit.factor, color=INK, linestyle=":", linewidth=1.2)
    axes.margins(*_MARGINS)
    _set_axes(axes, across, log)
    if not log:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(f"{SHORT[name]}, {unit.name}")
    return has_limit


def _line(axes: Axes, curve: Curve, place: int, across: _Across, name: str, factor: float) -> None:
    own, tail = _look(curve, place), name.endswith("p99")
    axes.errorbar(
        across.values(curve), curve.values(name) * factor, yerr=curve.reach(name) * factor, color=own.colour,
        marker=own.marker, linestyle="--" if tail else "-", markerfacecolor="none" if tail else own.colour,
        linewidth=1.3, markersize=3.5, elinewidth=0.8, capsize=2,
    )  # fmt: skip


def _set_axes(axes: Axes, across: _Across, log: bool) -> None:
    set_scale(axes, "x", across.log, most=4)
    set_scale(axes, "y", log, most=5)
    axes.set_xlabel(across.label)


def _name_points(axes: Axes, curves: Sequence[Curve], name: str) -> None:
    """Put the swept value above each p99 and its bar, where it fits."""
    if not axes.axison:
        return
    unit = seconds_unit([curve.values(f"{name}.{mark}") for curve in curves for mark in ("p50", "p99")])
    points = []
    for curve in curves:
        tops = (curve.values(f"{name}.p99") + curve.reach(f"{name}.p99")[1]) * unit.factor
        at = curve.values("output_tokens_per_s")
        named = [Named(*each) for each in zip(at, tops, curve.names, strict=True) if each[2]]
        points += [named[curve.chosen], *named] if curve.chosen is not None else named
    put_names(axes, points)


@styled()
def rates(curves: Sequence[Curve]) -> Figure | None:
    """Completed requests per second, those within the SLO, and their share, over the offered rate; None for loads
    without a rate."""
    if not any(np.isfinite(curve.values("offered_per_s")).any() for curve in curves):
        return None
    good = any(np.isfinite(curve.values("goodput_per_s")).any() for curve in curves)
    figure, panels = new_figure("Offered and completed load", columns=3 if good else 1, height=3.4)
    _rate_panel(panels[0], curves, "requests_per_s", "ended, requests/s")
    if good:
        _rate_panel(panels[1], curves, "goodput_per_s", "within the SLO, requests/s")
        _rate_panel(panels[2], curves, "slo_share", "within the SLO, % of what was due", percent=True)
    put_legend(figure, [*_handles(curves), line_handle("all that was due", MUTED, linestyle=":")])
    return figure


def _rate_panel(axes: Axes, curves: Sequence[Curve], name: str, label: str, *, percent: bool = False) -> None:
    most = 0.0
    factor = 100.0 if percent else 1.0
    for place, curve in enumerate(curves):
        due, done = curve.values("offered_per_s"), curve.values(name) * factor
        known = np.isfinite(due) & np.isfinite(done)
        if not known.any():
            continue
        order, own = np.argsort(due[known], kind="stable"), _look(curve, place)
        axes.errorbar(
            due[known][order], done[known][order], yerr=factor * curve.reach(name)[:, known][:, order],
            color=own.colour, marker=own.marker, linestyle=own.line, elinewidth=0.8, capsize=2, markersize=3.5,
        )  # fmt: skip
        most = max(most, float(due[known].max()))
    if not most:
        say(axes, "The load was not at a rate.")
        return
    axes.plot([0, most], [100, 100] if percent else [0, most], color=MUTED, linestyle=":", zorder=1)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    if percent:
        axes.set_ylim(0, 105)
    set_scale(axes, "x", False, most=5)
    set_scale(axes, "y", False, most=5)
    axes.set_xlabel("due, requests/s")
    axes.set_ylabel(label)


def _put_latency_legend(figure: Figure, curves: Sequence[Curve], has_limit: bool) -> None:
    styles = [
        line_handle("p50", MUTED, marker="o"),
        line_handle("p99", MUTED, linestyle="--", marker="o", markerfacecolor="none"),
    ]
    put_legend(figure, [*_handles(curves), *styles, *([line_handle("SLO", INK, linestyle=":")] if has_limit else [])])


def _handles(curves: Sequence[Curve]) -> list[Artist]:
    if len(curves) == 1:
        return []
    looks = [_look(curve, place) for place, curve in enumerate(curves)]
    return [line_handle(each.label, own.colour, marker=own.marker) for each, own in zip(curves, looks, strict=True)]


def _look(curve: Curve, place: int) -> Look:
    return curve.own or look(place)
