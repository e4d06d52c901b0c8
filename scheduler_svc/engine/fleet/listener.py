"""How others learn of the executor set: events of all executors, and a condition that is checked after changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from cadenza_common.plan.result import StepResult
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.metrics.numbers import EngineNumbers


class ExecutorSetListener(Protocol):
    """Receives the events of all executors; called on the event loop, never concurrently."""

    numbers: EngineNumbers

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Samples have new tokens or have finished."""

    def on_planned(self, step: PlannedStep) -> None:
        """A step was planned and will be sent next."""

    def on_applied(
        self, step: PlannedStep, result: StepResult, outputs: StepOutputs, now: float
    ) -> Callable[[], None] | None:
        """As in PlanLoopListener."""

    def on_session_ended(self, executor_id: int) -> None:
        """The plans in flight of this executor are lost."""

    def on_failed(self, error: Exception) -> None:
        """No executor can ever be used again, or a loop crashed."""

    def report_health(self) -> None:
        """`can_serve` may have changed."""


class ChangeSignal:
    """Wakes those that wait for a condition; a change costs nothing while nobody waits."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Event] = set()

    def notify(self) -> None:
        """Something has changed."""
        for changed in self._waiting:
            changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        changed = asyncio.Event()
        self._waiting.add(changed)
        try:
            while not holds():
                await changed.wait()
                changed.clear()
        finally:
            self._waiting.discard(changed)
