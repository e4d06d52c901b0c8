"""One executor of the service: its plan loop, what became of it, and when its requests go to the others.

An executor that is lost keeps its requests for MOVE_AFTER_S, since a session that broke is mostly opened again at
once, with the KV that is there. Then its requests go to the others, if one of them takes requests. With a single
executor, requests wait for it however long that takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine.request_trace import ExecutorIdentity
from scheduler_svc.plan_loop.clock import Clock, ScheduledCall
from scheduler_svc.plan_loop.gauges import Load, lane_load
from scheduler_svc.plan_loop.plan_loop import PlanLoop
from scheduler_svc.plan_loop.ports import ExecutorPort, ExecutorState

_REFUSED_FOR_S = 5.0
"""A refusal is repeated at least so often while it is true: a refused executor is described again every second, and a
lease that ends is waited for 2 s."""
MOVE_AFTER_S = 0.5
"""Requests of a lost executor move this long after the end of its session: later than a session that is opened again
(0.2 s), earlier than a process that is started again."""


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
    incarnation: int = 0
    """Of its last session; 0: it has had none."""
    accepted: bool = False
    """Whether it has had a session, and serves the same model as the others."""
    draining: bool = False
    refusal: str = ""
    """Why it could not be used although it answered, when it last did; empty: it has been used since."""
    refused_at: float = 0.0
    """When that was last so, in seconds on the clock."""
    error: Exception | None = None
    """The error behind `refusal`."""
    fenced: bool = False
    """Whether the reason of the last refusal is that another scheduler holds it."""
    lost_at: float | None = None
    """When its last session ended, in seconds on the clock; None: it has one, or had none."""
    moves_at: float = 0.0
    """When its requests may move, if it is lost."""
    given_up: bool = False
    """Whether its requests have moved since it was lost."""
    timer: ScheduledCall | None = None
    """Runs until `moves_at`."""

    @property
    def target(self) -> str:
        """Its address."""
        return self.port.target

    @property
    def identity(self) -> ExecutorIdentity:
        """The process that it is, or was in its last session."""
        return ExecutorIdentity(self.target, self.loop.incarnation)

    @property
    def takes_requests(self) -> bool:
        """Whether it can begin a request now."""
        return self.loop.connected and not self.loop.stalled and not self.draining

    @property
    def is_live(self) -> bool:
        """Whether it has a session."""
        return self.loop.connected

    def has_other_incarnation(self) -> bool:
        """Take note of the incarnation of the session that was opened; whether the last session was with another."""
        former, self.incarnation = self.incarnation, self.loop.incarnation
        return former not in (0, self.incarnation)

    def accept(self) -> None:
        """Record that a session is open."""
        self.refusal, self.error, self.fenced = "", None, False
        self.lost_at, self.given_up = None, False

    def refuse(self, error: Exception, now: float, *, fenced: bool) -> None:
        """Record that it answers and cannot be used; `fenced`: because another scheduler holds it."""
        self.refusal, self.error, self.fenced, self.refused_at = str(error), error, fenced, now

    def is_refused(self, now: float) -> bool:
        """Whether the refusal is still true: it is not known of a process that has died since."""
        return bool(self.refusal) and now < self.refused_at + _REFUSED_FOR_S

    def cancel_timer(self) -> None:
        """Stop the timer."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def state(self, core: Scheduler, now: float) -> ExecutorState:
        """Its current state."""
        lane = self.loop.lane
        return self.loop.state(
            draining=self.draining,
            refusal=self.refusal if self.is_refused(now) else "",
            load=lane_load(core, lane) if lane is not None else Load(),
        )


class RequestMoves:
    """Finds the executors whose requests are to move, and calls when the time of the next has come."""

    def __init__(self, clock: Clock, give_up: Callable[[ExecutorMember], None], on_due: Callable[[], None]) -> None:
        """give_up: moves the requests of an executor. on_due: called when it is time for `move`."""
        self._clock = clock
        self._give_up = give_up
        self._on_due = on_due

    def on_lost(self, member: ExecutorMember, *, stopped: bool) -> None:
        """A session has ended; stopped: a signal has stopped the executor, so it will not be back soon."""
        member.lost_at = self._clock.monotonic()
        member.moves_at = member.lost_at if stopped else member.lost_at + MOVE_AFTER_S

    def move(self, members: Iterable[ExecutorMember]) -> None:
        """Move the requests of those that are lost or stalled, while another one takes requests."""
        now = self._clock.monotonic()
        for member in members:
            if member.loop.stalled:
                member.loop.end_session("it makes no progress")
            elif member.lost_at is not None and not member.given_up:
                if now >= member.moves_at:
                    member.given_up = True
                    member.cancel_timer()
                    self._give_up(member)
                elif member.timer is None:
                    member.timer = self._clock.call_later(member.moves_at - now, partial(self._on_timer, member))

    def _on_timer(self, member: ExecutorMember) -> None:
        member.timer = None
        self._on_due()
