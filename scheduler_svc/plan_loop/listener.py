"""What a plan loop reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cadenza_common.plan.result import StepResult
from scheduler_svc.core.adapters.events import AdapterCommands, AdapterLoaded, AdapterUnloaded
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.plan_loop.ports import ExecutorLostError, ModelDescription

AdoptModel = Callable[[Callable[[], None]], None]
"""Adopts an executor's description: calls its argument, which gives the lane the executor's limits.

Raises ModelRefusedError, before that call, if the executor cannot be served any more.
"""


class PlanLoopListener(Protocol):
    """Receives the loop's events; called on the event loop, never concurrently."""

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Samples have new tokens or have finished."""

    def on_planned(self, step: PlannedStep) -> None:
        """A step was planned and will be sent next."""

    def on_applied(
        self, step: PlannedStep, result: StepResult, outputs: StepOutputs, now: float
    ) -> Callable[[], None] | None:
        """A step's result was applied, with these outputs, which are delivered later.

        The loop makes the returned call after that.
        """

    def on_adapters(
        self, executor_id: int, message: AdapterCommands | AdapterLoaded | AdapterUnloaded, now: float
    ) -> None:
        """Loads and unloads of adapters were sent, or one was answered."""

    def on_connected(self, executor_id: int) -> None:
        """A session was opened."""

    def on_lost(self, executor_id: int, error: ExecutorLostError | None, outputs: StepOutputs) -> None:
        """A session has ended, with these outputs; `error` is None if the loop was cancelled."""

    def on_progress(self, executor_id: int) -> None:
        """The executor has stalled, or makes progress again."""

    def on_refused(self, executor_id: int, error: Exception) -> None:
        """The executor answers, but cannot be used: LimitsError, ModelRefusedError, or ExecutorLostError.

        It is described again until it, or another one at its address, can.
        """

    async def check_model(self, executor_id: int, model: ModelDescription) -> AdoptModel:
        """Prepare for an executor with this description; raises ModelRefusedError.

        The loop calls the result once the session is open.
        """
