"""Prepares prompts before their requests are due, some hundreds of requests ahead of the clock."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from cadenza_loadtest.requests import RequestShape

_AHEAD = 512
_AHEAD_BURST = 20_000
_AHEAD_TOKENS = 1_000_000
"""Limit for the total length of prepared prompts: about 40 MB."""
_LATER_S = 0.0005
"""Delay after which the next prompt is made, so that the request that was taken is sent first."""


@dataclass(slots=True)
class DueUnit:
    """A request, or a session with its later turns, which is due as one."""

    due_s: float
    """Seconds since the start."""
    shapes: list[RequestShape]
    prompt: list[int] | str = ""
    """The prompt of the first turn."""


def units(schedule: Iterable[tuple[float, RequestShape]]) -> Iterator[DueUnit]:
    """The schedule as units, lazily; the turns of one session, which follow each other, form one unit."""
    for _, group in groupby(schedule, key=_unit_key):
        entries = list(group)
        yield DueUnit(entries[0][0], [shape for _, shape in entries])


def _unit_key(entry: tuple[float, RequestShape]) -> tuple[int, int]:
    shape = entry[1]
    return (shape.session, -1) if shape.session >= 0 else (-1, shape.index)


class PreparedUnits:
    """Units whose prompts are prepared, some hundreds ahead of the unit taken last.

    An error in preparing a unit is raised when that unit is taken.
    """

    def __init__(self, schedule: Iterator[DueUnit], make: Callable[[RequestShape], list[int] | str]) -> None:
        self._schedule = schedule
        self._make = make
        self._ready: deque[DueUnit] = deque()
        self._num_tokens = 0
        self._error: Exception | None = None
        self._over = False

    def fill(self) -> None:
        """Prepare units before the start: the usual number, and the whole of an initial burst if the limits allow
        it."""
        while self._make_one(burst=True):
            pass

    def take(self) -> DueUnit | None:
        """The next unit; None at the end. Raises what the schedule or the prompt maker raised."""
        if not self._ready:
            self._make_one()
        if not self._ready:
            if self._error is not None:
                raise self._error
            return None
        unit = self._ready.popleft()
        self._num_tokens -= len(unit.prompt)
        if not self._over:
            asyncio.get_running_loop().call_later(_LATER_S, self._make_one)
        return unit

    def _make_one(self, burst: bool = False) -> bool:
        """Prepare one unit; False if none is left or the limits are reached."""
        if self._over or (self._ready and not self._has_room(burst)):
            return False
        try:
            unit = next(self._schedule, None)
            if unit is not None:
                unit.prompt = self._make(unit.shapes[0])
        except Exception as error:
            self._error, unit = error, None
        if unit is None:
            self._over = True
            return False
        self._ready.append(unit)
        self._num_tokens += len(unit.prompt)
        return True

    def _has_room(self, burst: bool) -> bool:
        at_once = burst and self._ready[0].due_s == self._ready[-1].due_s
        return len(self._ready) < (_AHEAD_BURST if at_once else _AHEAD) and self._num_tokens < _AHEAD_TOKENS
