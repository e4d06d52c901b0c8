"""Faults of a simulated executor, for tests: `--inject`."""

from __future__ import annotations

import time
from dataclasses import dataclass

from executor_svc.errors import StartError

_FOR_EVER_S = 1e9


class InjectionError(StartError):
    """--inject is not one that exists."""


@dataclass(slots=True)
class HangingStep:
    """One step of this process takes longer than its work; it blocks the device thread and nothing else."""

    number: int
    """Which step, from 1."""
    seconds: float
    _num_steps: int = 0

    def before_step(self) -> None:
        """Count a step, and hang in the one that was chosen."""
        self._num_steps += 1
        if self._num_steps == self.number:
            time.sleep(self.seconds)


def read_injection(text: str) -> HangingStep:
    """Parse `hang@STEP` or `hang@STEP:SECONDS`; without SECONDS the step never ends. Raises InjectionError."""
    kind, _, place = text.partition("@")
    number, colon, seconds = place.partition(":")
    try:
        found = HangingStep(int(number), float(seconds) if colon else _FOR_EVER_S)
    except ValueError:
        found = HangingStep(0, 0.0)
    if kind != "hang" or found.number < 1 or not 0 < found.seconds <= _FOR_EVER_S:
        raise InjectionError(f"--inject {text}: must be hang@STEP or hang@STEP:SECONDS")
    return found
