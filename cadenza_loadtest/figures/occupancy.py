"""Figure of the scheduler over a run: sequences in the batch, requests in the queues, KV blocks in use."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cadenza_loadtest.figures.style import FAILED, line_handle, look, new_figure, put_panel_legend, say, styled
from cadenza_loadtest.figures.thinning import binned
from cadenza_loadtest.figures.ticks import clock_unit, set_scale
from cadenza_loadtest.measures.columns import StepColumns
from cadenza_loadtest.requests import Floats

_BINS = 350


@styled()
def occupancy(steps: StepColumns, label: str = "", block_size: int | None = None) -> Figure:
    """Three panels over the run's time; with many steps, each point is the mean of a bin and the shade its range.

    With the `block_size` in tokens, the third panel also shows the share of the pool that holds tokens; the rest of the
    blocks in use is free slots.
    """
    title = f"Batch, queues and KV cache: {label}" if label else "Batch, queues and KV cache over the run"
    figure, panels = new_figure(title, rows=3, height=6.4)
    at = clock_unit([steps.planned_s])
    for axes, name in zip(panels, ("Batch", "Queues", "KV cache"), strict=True):
        axes.set_title(name)
    if not len(steps):
        for axes in panels:
            say(axes, "No steps were recorded.")
        return figure
    times = steps.planned_s * at.factor
    _band(panels[0], times, steps.num_sequences, 0)
    panels[0].set_ylabel("sequences in a step")
    handles: list[Artist] = []
    for place, counts in enumerate((steps.num_running, steps.num_waiting, steps.num_swapped)):
        if place == 0 or counts.any():
            _band(panels[1], times, counts, place)
            handles.append(line_handle(("running", "waiting", "swapped out")[place], look(place).colour))
    panels[1].set_ylabel("requests")
    handles += _put_preemptions(panels[1], times, steps.num_preempted)
    put_panel_legend(panels[1], handles)
    put_panel_legend(panels[2], _kv(panels[2], times, steps, block_size))
    for axes in panels:
        if axes.axison:
            axes.set_ylim(bottom=0)
            set_scale(axes, "x", False)
            set_scale(axes, "y", False, most=4)
            axes.set_xlabel(f"{at.name} since the start")
    return figure


def _kv(axes: Axes, times: Floats, steps: StepColumns, block_size: int | None) -> list[Artist]:
    if not (steps.num_blocks > 0).any():
        say(axes, "The size of the pool is not known.")
        return []
    blocks = np.where(steps.num_blocks > 0, steps.num_blocks, np.nan).astype(np.float64)
    _band(axes, times, 100 * steps.num_used_blocks / blocks, 0)
    axes.set_ylabel("share of the pool, %")
    in_use: list[Artist] = [line_handle("in use", look(0).colour)]
    if not block_size:
        return in_use
    _band(axes, times, 100 * steps.num_stored_tokens / (blocks * block_size), 3)
    return [*in_use, line_handle("holds tokens", look(3).colour)]


def _put_preemptions(axes: Axes, times: Floats, counts: npt.NDArray[np.int64]) -> list[Artist]:
    rows = counts > 0
    if not rows.any():
        return []
    style = {"linestyle": "", "marker": "|", "markersize": 7}
    axes.plot(times[rows], np.zeros(int(rows.sum())), color=FAILED, transform=axes.get_xaxis_transform(), clip_on=False,
              rasterized=int(rows.sum()) > 2000, **style)  # type: ignore[arg-type]  # fmt: skip
    return [line_handle(f"preemption ({int(counts.sum()):,})", FAILED, **style)]


def _band(axes: Axes, times: Floats, values: npt.NDArray[np.number], place: int) -> None:
    bins = binned(times, values, _BINS)
    axes.fill_between(bins.at, bins.low, bins.high, color=look(place).colour, alpha=0.18, linewidth=0)
    marker = "o" if len(bins.at) == 1 else ""
    axes.plot(bins.at, bins.mean, color=look(place).colour, linewidth=1.2, marker=marker)
