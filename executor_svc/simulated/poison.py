"""A request that kills the simulated executor, for tests: `--inject die@TOKEN:POSITION`."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.simulated.injection import InjectionError


@dataclass(frozen=True, slots=True)
class Poison:
    """A step that computes this position of a sequence whose prompt has this token kills the process."""

    token_id: int
    position: int

    def before_compute(self, slots: Slots, scheduled: Scheduled) -> None:
        """Kill the process, as the kernel would, if the step is fatal."""
        if self.is_fatal(slots, scheduled):
            os.kill(os.getpid(), signal.SIGKILL)

    def is_fatal(self, slots: Slots, scheduled: Scheduled) -> bool:
        """Return whether the step computes the position."""
        rows = scheduled.slots
        starts = slots.num_computed_tokens[rows]
        reached = rows[(starts <= self.position) & (self.position < starts + scheduled.num_tokens)]
        return any(self.token_id in slots.token_ids[slot, : slots.num_prompt_tokens[slot]] for slot in reached.tolist())


def split_poison(text: str | None) -> tuple[Poison | None, str | None]:
    """Return `die@TOKEN:POSITION`, and the other faults of --inject; None: there are none. Raises InjectionError."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    fatal = [part for part in parts if part.startswith("die@")]
    others = [part for part in parts if part not in fatal]
    if len(fatal) > 1:
        raise InjectionError(f"--inject {text}: die@TOKEN:POSITION is possible once")
    return _read_poison(fatal[0]) if fatal else None, ",".join(others) if others else None


def _read_poison(text: str) -> Poison:
    token_id, _, position = text.removeprefix("die@").partition(":")
    if not (token_id.isdecimal() and position.isdecimal()):
        raise InjectionError(f"--inject {text}: must be die@TOKEN:POSITION")
    return Poison(int(token_id), int(position))
