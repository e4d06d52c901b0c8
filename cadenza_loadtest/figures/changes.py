"""The figure of a comparison: each metric's ratio to the first file's value, with its interval."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cadenza_loadtest.figures.style import INK, MUTED, drawable, line_handle, look, new_figure, put_legend, say, styled
from cadenza_loadtest.figures.ticks import plain, set_scale
from cadenza_loadtest.measures.metric_names import describe
from cadenza_loadtest.results.comparison import Change

_LOOKS = {
    "better": (look(2).colour, True),
    "worse": (look(5).colour, True),
    "different": (look(0).colour, True),
    "no difference shown": (MUTED, True),
    "not known": (MUTED, False),
}
"""Colour by label of a change, and whether its mark is filled."""
_ROW = 0.27
"""Inches."""


@styled()
def ratios(changes: Sequence[Change], title: str) -> Figure:
    """A row for each metric with a ratio; the legend labels each as better, worse, or without a shown difference."""
    rows = [change for change in changes if change.ratio is not None][::-1]
    figure, (axes,) = new_figure(title, height=1.5 + _ROW * max(3, len(rows)))
    if not rows:
        say(axes, "No ratio is known.")
        return figure
    for place, change in enumerate(rows):
        ratio = change.ratio
        assert ratio is not None
        colour, filled = _LOOKS[_legend_label(change)]
        if ratio.low is not None and ratio.high is not None:
            axes.plot([ratio.low, ratio.high], [place, place], color=colour, linewidth=2.2, alpha=0.55)
        axes.plot([ratio.value], [place], color=colour, marker="o", linestyle="", markerfacecolor=_face(colour, filled))
        axes.annotate(
            plain(float(f"{ratio.value:.3g}")),
            (1.01, place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
        )
    axes.axvline(1, color=INK, linewidth=0.9)
    axes.set_yticks(range(len(rows)), [drawable(describe(change.metric).label) for change in rows])
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.grid(axis="y", visible=False)
    _set_scale(axes, rows)
    axes.set_xlabel("times the first file's value, 95% interval (logarithmic)")
    labels = {_legend_label(change) for change in rows}
    put_legend(figure, [line_handle(name, colour, marker="o", markerfacecolor=_face(colour, filled),
                                    linestyle="-" if filled else "")
                        for name, (colour, filled) in _LOOKS.items() if name in labels])  # fmt: skip
    return figure


def _set_scale(axes: Axes, rows: Sequence[Change]) -> None:
    """Set a logarithmic scale, on which 2 and 1/2 are equally far from 1; intervals that reach 0 are truncated."""
    ratios = [change.ratio for change in rows if change.ratio is not None]
    values = [each.value for each in ratios if each.value > 0]
    ends = [end for each in ratios for end in (each.low, each.high) if end is not None and end > 0]
    low, high = min([0.9, *values, *ends]), max([1.1, *values, *ends])
    low = max(low, min([0.9, *values]) / 4)
    axes.set_xlim(low / (high / low) ** 0.04, high * (high / low) ** 0.04)
    set_scale(axes, "x", True, most=7)


def _legend_label(change: Change) -> str:
    if change.verdict not in ("lower", "higher"):
        return change.verdict
    less_is_better = describe(change.metric).less_is_better
    if less_is_better is None:
        return "different"
    return "better" if (change.verdict == "lower") == less_is_better else "worse"


def _face(colour: str, filled: bool) -> str:
    return colour if filled else "none"
