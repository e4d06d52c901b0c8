"""The figure of capacity over the number of executors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from cadenza_loadtest.figures.style import MUTED, line_handle, look, new_figure, put_legend, save, say, styled
from cadenza_loadtest.figures.ticks import plain, set_scale
from cadenza_simulator.capacity.capacity import Capacity, as_plot

_NAME = "capacity"


@styled()
def capacity_figure(capacities: Sequence[Capacity]) -> Figure:
    """The highest rate that holds over the number of executors, beside linear scaling of the first."""
    figure, (axes,) = new_figure("Highest request rate that holds the SLO", height=3.8)
    counts, rates = as_plot(capacities)
    if not counts:
        say(axes, "No rate that was tried holds.")
        return figure
    drawn, ideal = look(0), [rates[0] * count / counts[0] for count in counts]
    axes.plot(counts, ideal, color=MUTED, linestyle="--", zorder=1)
    axes.plot(counts, rates, color=drawn.colour, marker=drawn.marker, zorder=2)
    for count, rate in zip(counts, rates, strict=True):
        axes.annotate(f"{rate:.3g}", (count, rate), (4, -11), textcoords="offset points", ha="left", va="center")
    axes.set_xlabel("executors")
    axes.set_ylabel("requests per second")
    axes.set_ylim(0, 1.08 * max(*rates, *ideal))
    axes.set_xlim(0, 1.08 * max(counts))
    set_scale(axes, "y", log=False)
    axes.set_xticks(counts, [plain(count) for count in counts])
    put_legend(
        figure,
        [
            line_handle("held", drawn.colour, marker=drawn.marker),
            line_handle("linear scaling of the first", MUTED, linestyle="--"),
        ],
    )
    return figure


def write_capacity(capacities: Sequence[Capacity], folder: Path) -> list[Path]:
    """Write the figure as PNG and SVG and return the files. Raises LoadTestError if one cannot be written."""
    return save(capacity_figure(capacities), folder, _NAME)
