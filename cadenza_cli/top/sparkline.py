"""A row of bars, one for each value."""

from __future__ import annotations

from collections.abc import Sequence

_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.:-=+*#"


def sparkline(values: Sequence[float | None], *, top: float, ascii_only: bool = False) -> str:
    """One character for each of `values` [n]: the lowest bar is 0, the highest is `top` and above, None is a space.

    `ascii_only` is for terminals that cannot show the bars.
    """
    bars = _ASCII_BARS if ascii_only else _BARS
    return "".join(" " if value is None else bars[_place(value, top, len(bars) - 1)] for value in values)


def _place(value: float, top: float, highest: int) -> int:
    return max(0, min(highest, round(highest * value / top))) if top > 0 else 0
