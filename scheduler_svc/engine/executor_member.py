"""One executor of the service: its plan loop, and what became of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from scheduler_svc.plan_loop.clock import Timer
from scheduler_svc.plan_loop.plan_loop import PlanLoop
from scheduler_svc.plan_loop.ports import ExecutorPort


class UnknownExecutorError(Exception):
    """There is no executor at this address."""


class ExecutorExistsError(Exception):
    """There is an executor at this address already."""


class LastExecutorError(Exception):
    """The last executor cannot be removed."""


@dataclass(slots=True, eq=False)
class ExecutorMember:
    """One executor, from its addition to its removal."""

    index: int
    """Never reused."""
    port: ExecutorPort
    loop: PlanLoop
    task: asyncio.Task[None] | None = None
    """Runs `loop`."""
    removal: asyncio.Task[None] | None = None
    accepted: bool = False
    """Whether it has had a session, and serves the same model as the others."""
    draining: bool = False
    refusal: str = ""
    """Why it cannot be used although it answers."""
    error: Exception | None = None
    """The error behind `refusal`."""
    fenced: bool = False
    """Whether another scheduler has it: no session is opened any more."""
    lost_at: float | None = None
    """When its last session ended, in seconds on the clock; None: it has one, or had none."""
    moves_at: float = 0.0
    """When its requests may move, if it is lost."""
    given_up: bool = False
    """Whether its requests have moved since it was lost."""
    timer: Timer | None = None
    """Runs until `moves_at`."""

    @property
    def target(self) -> str:
        """Its address."""
        return self.port.target

    @property
    def takes_requests(self) -> bool:
        """Whether it can begin a request now."""
        return self.loop.connected and not self.loop.stalled and not self.draining

    @property
    def is_live(self) -> bool:
        """Whether it has a session."""
        return self.loop.connected

    def cancel_timer(self) -> None:
        """Stop the timer."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
