"""Units, scales and ticks of axes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from cadenza_loadtest.requests import Floats

_LOG_DECADES = 1.5
"""A range of more decades than this is drawn on a logarithmic axis."""


@dataclass(frozen=True, slots=True)
class TickUnit:
    """A unit: a value in base units times `factor` is a value in this unit."""

    name: str
    factor: float


def seconds_unit(values: Iterable[npt.ArrayLike]) -> TickUnit:
    """The unit for latencies in seconds: milliseconds if all are below one second."""
    return TickUnit("ms", 1e3) if _greatest(values) < 1 else TickUnit("s", 1)


def clock_unit(values: Iterable[npt.ArrayLike]) -> TickUnit:
    """The unit for a run's time in seconds: minutes from 20 minutes on, hours from 3 hours on."""
    greatest = _greatest(values)
    if greatest < 1200:
        return TickUnit("s", 1)
    return TickUnit("min", 1 / 60) if greatest < 3 * 3600 else TickUnit("h", 1 / 3600)


def wants_log(values: Iterable[npt.ArrayLike]) -> bool:
    """Whether the positive values span so wide a range that a linear axis would hide most of them."""
    known = _known(values)
    known = known[known > 0]
    return len(known) > 1 and bool(np.log10(known.max() / known.min()) > _LOG_DECADES)


def plain(value: float) -> str:
    """A number in plain notation."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:g}"


def set_scale(axes: Axes, which: Literal["x", "y"], log: bool, most: int = 6) -> None:
    """Set a linear scale within matplotlib's own limits, or a logarithmic one, with at most `most` ticks.

    Call it after the data are drawn.
    """
    axis = axes.xaxis if which == "x" else axes.yaxis
    if log:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
        decades = np.log10(high / low)
        subs: tuple[float, ...] = (
            (1.0, 2.0, 5.0) if decades * 3 <= most + 1 else (1.0, 3.0) if decades * 2 <= most + 1 else (1.0,)
        )
        if decades < 0.7:
            subs = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
        axis.set_major_locator(LogLocator(subs=subs, numticks=most + 2))
        axis.set_minor_locator(LogLocator(subs=tuple(np.arange(2.0, 10.0)), numticks=60))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(float(f"{value:.6g}"))))


def _known(values: Iterable[npt.ArrayLike]) -> Floats:
    parts = [np.asarray(each, np.float64).ravel() for each in values]
    joined = np.concatenate(parts) if parts else np.zeros(0)
    return joined[np.isfinite(joined)]


def _greatest(values: Iterable[npt.ArrayLike]) -> float:
    known = _known(values)
    return float(np.abs(known).max()) if len(known) else 0.0
