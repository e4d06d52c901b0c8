"""Faults of an executor, for tests: `--inject`. The simulated executor has them, and the one of a model on the CPU."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.errors import StartError

_log = logging.getLogger(__name__)

_FOR_EVER_S = 1e9
_KINDS = {
    "hang": ":SECONDS",
    "oom": "",
    "device-error": "",
    "non-finite": ":SLOT",
}
"""Each kind of fault, with the form of its argument, which may be left out."""
FORMS = tuple(f"{kind}@STEP" + (f"[{argument}]" if argument else "") for kind, argument in _KINDS.items())


class InjectionError(StartError):
    """--inject has a fault that does not exist."""


class InjectedOutOfMemoryError(MemoryError):
    """The device is out of memory; later steps may run."""


class InjectedDeviceError(RuntimeError):
    """This process has lost the device: its message is that of a CUDA error after which no step runs any more."""


@dataclass(slots=True)
class InjectedFault:
    """It happens once, in the first step from this number on that can have it."""

    kind: str
    step: int
    """A step of this process, from 1. Steps of which the plan is invalid count too."""
    argument: float | None = None
    happened: bool = False


class Injection:
    """The faults of one process. An executor calls it at the places of a step where its device could fail."""

    def __init__(self, faults: Sequence[InjectedFault]) -> None:
        self.faults = tuple(faults)
        self._num_steps = 0

    def before_step(self) -> None:
        """Count a step, and hang in it: this blocks the device thread and nothing else."""
        self._num_steps += 1
        for fault in self._due("hang"):
            fault.happened = True
            time.sleep(_FOR_EVER_S if fault.argument is None else fault.argument)

    def before_compute(self) -> None:
        """Fail after the plan's block moves and before its forward pass, so that no KV of the step is written."""
        for fault in self._due("oom", "device-error"):
            fault.happened = True
            if fault.kind == "oom":
                raise InjectedOutOfMemoryError("injected")
            raise InjectedDeviceError("CUDA error: an illegal memory access was encountered (injected)")

    def non_finite_rows(self, slots: Sequence[int]) -> list[int]:
        """The rows of logits that are not finite in this step; slots: the slot of each row."""
        rows: list[int] = []
        for fault in self._due("non-finite"):
            slot = None if fault.argument is None else int(fault.argument)
            found = [row for row, each in enumerate(slots) if slot in (None, each) and row not in rows]
            if found:
                fault.happened = True
                rows.append(found[0])
        return rows

    def _due(self, *kinds: str) -> list[InjectedFault]:
        return [
            each for each in self.faults if each.kind in kinds and not each.happened and each.step <= self._num_steps
        ]


def read_injection(text: str) -> Injection:
    """Parse faults, joined by commas, in the forms of `FORMS`. Raises InjectionError.

    hang: without SECONDS the step never ends. non-finite: without SLOT it is the lowest slot that samples.
    """
    injection = Injection([_read_fault(text, part.strip()) for part in text.split(",")])
    _log.warning("--inject %s: this process fails on purpose, for tests", text)
    return injection


def _read_fault(text: str, part: str) -> InjectedFault:
    kind, _, place = part.partition("@")
    step, colon, argument = place.partition(":")
    try:
        fault = InjectedFault(kind, int(step), _read_argument(kind, argument) if colon else None)
    except ValueError:
        fault = InjectedFault("", 0)
    if kind not in _KINDS or fault.step < 1:
        raise InjectionError(f"--inject {text}: {part!r} must be one of {', '.join(FORMS)}")
    return fault


def _read_argument(kind: str, argument: str) -> float:
    """The argument of a fault of this kind; raises ValueError."""
    match _KINDS.get(kind, ""):
        case ":SECONDS":
            value = float(argument)
            if 0 < value <= _FOR_EVER_S:
                return value
        case ":SLOT":
            slot = int(argument)
            if slot >= 0:
                return slot
    raise ValueError(argument)


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
