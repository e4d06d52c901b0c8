"""The curves of a sweep's figures: a file's points over one swept setting, one curve per value of the other
settings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cadenza_loadtest.figures.style import MOST_NAME, Look, drawable, look, look_within
from cadenza_loadtest.figures.sweeps import Curve
from cadenza_loadtest.reports.summary import swept_text
from cadenza_loadtest.results.results import LoadTestFile, Point

_FIRST = ("request_rate", "concurrency")
"""The preferred settings for the x axis, if they were swept."""


def curves_of(files: Sequence[LoadTestFile]) -> list[Curve]:
    """All curves; with several files, the curves of a file share its colour."""
    curves = []
    for place, file in enumerate(files):
        along = _along(file.points)
        for part, (others, points) in enumerate(_groups(file.points, along).items()):
            named = [drawable(file.label, MOST_NAME)] if len(files) > 1 or not others else []
            label = ", ".join([*named, others] if others else named)
            own = look_within(place, part) if len(files) > 1 else look(part)
            curves.append(_curve(label, points, along, file, own))
    return curves


def _along(points: Sequence[Point]) -> str:
    """The setting of the x axis: a rate, or else another number; empty: the swept values are names, which no line
    joins."""
    values: dict[str, set[float | str]] = {}
    for point in points:
        for name, value in point.swept.items():
            values.setdefault(name, set()).add(value)
    everywhere = [name for name in values if all(name in point.swept for point in points)]
    numbers = [name for name in everywhere if all(_float(each) is not None for each in values[name])]
    finite = [name for name in numbers if all(_number(each) is not None for each in values[name])]
    several = [name for name in _FIRST if name in finite and len(values[name]) > 1]
    return max(several[:1] or finite or numbers, key=lambda name: len(values[name]), default="")


def _groups(points: Sequence[Point], along: str) -> dict[str, list[Point]]:
    """The points grouped by the other swept settings, as text; sorted within a group if the values are numbers."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        others = {name: value for name, value in point.swept.items() if name != along}
        groups.setdefault(swept_text(others), []).append(point)
    for group in groups.values():
        group.sort(key=lambda point: _number(point.swept.get(along, "")) or 0.0)
    return groups


def _curve(label: str, points: Sequence[Point], along: str, file: LoadTestFile, own: Look) -> Curve:
    at = [number for point in points if (number := _number(point.swept.get(along, ""))) is not None]
    is_number = len(at) == len(points)
    held = file.max_rate.held if file.max_rate is not None else None
    return Curve(
        label,
        [_name(point.swept[along]) if along else "" for point in points],
        [point.summary for point in points],
        along.replace("_", "-") if is_number else "",
        at if is_number else [],
        own,
        at.index(held) if is_number and along == "request_rate" and held in at else None,
    )


def _name(value: float | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else value


def _number(value: float | str) -> float | None:
    """The value as a number; None for other values and for infinity, which has no place on an axis."""
    number = _float(value)
    return number if number is not None and math.isfinite(number) else None


def _float(value: float | str) -> float | None:
    """The value as a number, or None; values given to `--sweep` are text."""
    try:
        return float(value)
    except ValueError:
        return None
