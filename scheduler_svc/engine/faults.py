"""Counts of faults: what went wrong since the start, by kind, and when it last did.

This is the one place where faults are counted. The engine creates a `Faults` (`Engine.faults`) and gives it to its
parts. To count a fault, call `faults.record(FaultKind.NAME)` on the event loop, with the executor's address where the
fault is about one. To add a kind, add a member to `FaultKind` here and to the one in generation.proto. To read the
counts, from any thread, use `faults[FaultKind.NAME].count`: every kind is there from the start, and a count never goes
back. GetServerInfo, `cadenza top` and the metrics show them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from scheduler_svc.plan_loop.clock import Clock


class FaultKind(StrEnum):
    """The kinds of faults; the value is the name in metrics and in logs."""

    EXECUTOR_LOST = "executor_lost"
    """The session with an executor broke: the executor died, was cut off, or failed a step. A stop is no fault."""
    EXECUTOR_STALLED = "executor_stalled"
    """A step of an executor has run for much longer than it should: the executor hangs."""
    EXECUTOR_RESTARTED = "executor_restarted"
    """Another process answered at the address of an executor that had a session before."""
    EXECUTOR_REFUSED = "executor_refused"
    """An executor answers and cannot be used: another model, limits that do not fit, or another scheduler holds it."""
    STEP_FAILED = "step_failed"
    """An executor reported that a step failed, or its result contradicted the plan."""
    REQUEST_SUSPECTED = "request_suspected"
    """A request was in a step in which an executor died, and is tried apart from the others."""
    REQUEST_MOVED = "request_moved"
    """A request went on at another executor than before."""
    REQUEST_FAILED = "request_failed"
    """A request that had been admitted ended with an error of the service, not of its own."""
    REQUEST_REFUSED = "request_refused"
    """A request was refused and never ran: it is wrong, the queue is full, or the service does not take any."""
    JOURNAL_FAILED = "journal_failed"
    """The journal cannot be written; until it can be, no request is admitted."""


@dataclass(slots=True)
class KindCount:
    """How often a kind of fault occurred, and the last one."""

    count: int = 0
    last_ns: int = 0
    """When it last occurred, on the clock's monotonic_ns; meaningless while `count` is 0."""
    last_executor: str = ""
    """The address of the executor that the last one was about; empty: none."""


class Faults:
    """The counts of all kinds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts = {fault: KindCount() for fault in FaultKind}

    def record(self, fault: FaultKind, executor: str = "", *, count: int = 1) -> None:
        """Count a fault, or several of a kind at once. `executor`: the address of the executor that it is about."""
        each = self._counts[fault]
        each.last_ns, each.last_executor = self._clock.monotonic_ns(), executor
        each.count += count

    def __getitem__(self, fault: FaultKind) -> KindCount:
        return self._counts[fault]

    def __iter__(self) -> Iterator[tuple[FaultKind, KindCount]]:
        """All kinds, in the order of `FaultKind`, also those that never occurred."""
        return iter(self._counts.items())

    def last_age_s(self, fault: FaultKind) -> float:
        """Seconds since a kind of fault last occurred."""
        return (self._clock.monotonic_ns() - self._counts[fault].last_ns) / 1e9
