"""The real time that a search may take."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cadenza_loadtest.requests import LoadTestError

DEFAULT_S = 45.0
"""Leaves time to start and to write the results: the whole command takes about a minute."""
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([smh]?)")


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """Seconds of real time, from when this object is made; inf: no limit."""

    seconds: float = math.inf
    clock: Callable[[], float] = time.monotonic
    """The present time, in seconds."""
    started: float = field(init=False)

    def __post_init__(self) -> None:
        """Start the clock."""
        object.__setattr__(self, "started", self.clock())

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.started

    @property
    def left_s(self) -> float:
        """Seconds that are left, 0 at least."""
        return max(0.0, self.seconds - self.elapsed_s)


def read_time_budget(text: str | None) -> float:
    """Seconds of `90`, `90s`, `5m` or `1h`; inf for `0` and `none`, the default for None. Raises LoadTestError."""
    if text is None:
        return DEFAULT_S
    found = _FORM.fullmatch(text.strip())
    if text.strip() != "none" and found is None:
        raise LoadTestError(f"--time-budget {text}: must be seconds, or a number with s, m or h, or none, as 90, 5m")
    seconds = 0.0 if found is None else float(found[1]) * _UNITS[found[2]]
    return seconds or math.inf
