"""Names beside points: as many as fit without overlapping each other or the drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.path import Path
from matplotlib.transforms import Bbox

from cadenza_loadtest.figures.style import MUTED, drawable

_MOST = 14
_PLACES = (("center", 0), ("left", 4), ("right", -4))
"""Candidate positions of a name above its point, in order of preference: alignment, and shift to the right in
points."""


class Named(NamedTuple):
    """A point in the panel's units, and its name."""

    x: float
    y: float
    name: str


def put_names(axes: Axes, points: Sequence[Named]) -> None:
    """Put a name above each point, in order; a name that would overlap a line, another name or an edge is left out.

    The layout must be computed before, because overlaps depend on it.
    """
    panel, drawn, taken = axes.get_window_extent(), _drawn(axes), list[Bbox]()
    for x, y, name in points:
        if not (math.isfinite(x) and math.isfinite(y)):
            continue
        for align, shift in _PLACES:
            text = axes.annotate(drawable(name, _MOST), (x, y), (shift, 3), textcoords="offset points", ha=align,
                                 fontsize=7.5, color=MUTED, in_layout=False)  # fmt: skip
            box = text.get_window_extent()
            if _is_within(box, panel) and not (
                any(box.overlaps(other) for other in taken) or any(path.intersects_bbox(box, False) for path in drawn)
            ):
                taken.append(box)
                break
            text.remove()


def _is_within(box: Bbox, panel: Bbox) -> bool:
    """Whether a name lies within the panel; the panel's title is close above it."""
    return bool(box.x0 >= panel.x0 and box.x1 <= panel.x1 + 2 and box.y0 >= panel.y0 and box.y1 <= panel.y1 + 2)


def _drawn(axes: Axes) -> list[Path]:
    """Paths of lines and bars, in pixels."""
    lines = [line for line in axes.lines if line.get_linestyle() not in ("None", "none", " ", "")]
    paths = [line.get_path().transformed(line.get_transform()) for line in lines]
    for bars in axes.collections:
        paths += [path.transformed(bars.get_transform()) for path in bars.get_paths()]
    return paths
