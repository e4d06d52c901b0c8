"""Traffic: first turns arrive by the schedule or when a user becomes free, later turns after the previous one ended."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from cadenza_loadtest.requests import RequestShape

NO_TOKENS: tuple[int, ...] = ()


@dataclass(slots=True)
class DueRequest:
    """A request that is due."""

    due_s: float
    shape: RequestShape
    history: tuple[int, ...] = NO_TOKENS
    """Tokens of the session's earlier turns: prompts and outputs."""


class Traffic:
    """Requests in the order in which they are due, from `cadenza_loadtest.schedule.make_schedule`.

    The schedule lists the turns of a session one after the other. The due times that it gives later turns are ignored:
    a later turn is due when the previous one has ended and its `think_s` have passed. With `concurrency` the loop is
    closed: that many users each send the next request when their last request, or session, has ended, until
    `duration_s`.
    """

    due: float
    """When the next request is due; inf: no request is due until another one ends."""

    def __init__(
        self,
        schedule: Iterator[tuple[float, RequestShape]],
        *,
        concurrency: int | None = None,
        duration_s: float | None = None,
    ) -> None:
        self._schedule = schedule
        self._closed = concurrency is not None
        self._duration_s = math.inf if duration_s is None else duration_s
        self._upcoming = next(schedule, None)
        self._first: DueRequest | None = None
        self._later: list[tuple[float, int, DueRequest]] = []
        """A heap of the requests that became due when another one ended; equal times are in the order of the
        workload."""
        self._turns: dict[int, list[RequestShape]] = {}
        """Turns not yet sent, by session, the next one last."""
        if concurrency is None:
            self._first = self._draw()
        for _ in range(concurrency or 0):
            self._next_user(0.0)
        self._settle()

    def take(self) -> DueRequest:
        """Remove and return the request that is due next; there must be one."""
        if self._later and self._later[0][0] == self.due:
            request = heapq.heappop(self._later)[2]
        else:
            assert self._first is not None, "nothing is due"
            request, self._first = self._first, self._draw()
        self._settle()
        return request

    def has_next_turn(self, shape: RequestShape) -> bool:
        """Whether another turn of the same session follows."""
        return shape.session in self._turns

    def ended(self, shape: RequestShape, at_s: float, history: tuple[int, ...] = NO_TOKENS) -> None:
        """A request has completed; `history` is its prompt and output, if a turn follows."""
        turns = self._turns.get(shape.session)
        if turns:
            following = turns.pop()
            if not turns:
                del self._turns[shape.session]
            self._push(DueRequest(at_s + following.think_s, following, history))
        elif self._closed:
            self._next_user(at_s)
        else:
            return
        self._settle()

    def failed(self, shape: RequestShape, at_s: float) -> list[RequestShape]:
        """A request was refused or failed, which ends its session. Returns the turns that are never sent, in order."""
        skipped = self._turns.pop(shape.session, [])[::-1]
        if self._closed:
            self._next_user(at_s)
            self._settle()
        return skipped

    def _draw(self) -> DueRequest | None:
        """The next first turn of the schedule; keeps the turns that follow it for later."""
        if self._upcoming is None:
            return None
        due_s, shape = self._upcoming
        following = next(self._schedule, None)
        if following is not None and following[1].turn and following[1].session == shape.session:
            turns = []
            while following is not None and following[1].turn and following[1].session == shape.session:
                turns.append(following[1])
                following = next(self._schedule, None)
            self._turns[shape.session] = turns[::-1]
        self._upcoming = following
        return DueRequest(due_s, shape)

    def _next_user(self, at_s: float) -> None:
        """A user is free and takes the next request of the schedule."""
        if at_s <= self._duration_s and (request := self._draw()) is not None:
            request.due_s = at_s
            self._push(request)

    def _push(self, request: DueRequest) -> None:
        heapq.heappush(self._later, (request.due_s, request.shape.index, request))

    def _settle(self) -> None:
        first = math.inf if self._first is None else self._first.due_s
        self.due = min(first, self._later[0][0]) if self._later else first
