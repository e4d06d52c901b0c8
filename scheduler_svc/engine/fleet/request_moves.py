"""When the requests of an executor go to the others.

An executor that is lost keeps its requests for MOVE_AFTER_S, since a session that broke is mostly opened again at
once, with the KV that is there. Then its requests go to the others, if one of them takes requests. With a single
executor, requests wait for it however long that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from scheduler_svc.engine.fleet.executor_member import ExecutorMember
from scheduler_svc.plan_loop.clock import Clock

MOVE_AFTER_S = 0.5
"""Requests of a lost executor move this long after the end of its session: later than a session that is opened again
(0.2 s), earlier than a process that is started again."""


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
