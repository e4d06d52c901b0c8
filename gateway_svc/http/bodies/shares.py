"""A bounded amount of something that many ask for: one of them may have as much of it as is free, and the rest waits.

So one who floods has half at most, and whoever else comes has room at once: the dynamic thresholds of Choudhury and
Hahne, IEEE/ACM Trans. Networking 6(2), 1998, as in the scheduler's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

from cadenza_common.grammar.tenant_turns import TenantTurns
from gateway_svc.http.errors import ApiError

MAX_WAITING = 512
"""That wait, of one no more than there are free places."""
_RETRY_S = 1.0


@dataclass(eq=False, slots=True)
class _RoomWait:
    amount: int
    granted: asyncio.Future[None]


class Shares:
    """Of one gateway; for use on one event loop."""

    def __init__(self, total: int, what: str, max_waiting: int = MAX_WAITING) -> None:
        """total: of all together; what: the name of those who wait, in the error."""
        self._total, self._what, self._max_waiting = total, what, max_waiting
        self._used: Counter[str] = Counter()
        self._waiting: TenantTurns[str, _RoomWait] = TenantTurns()

    @property
    def num_used(self) -> int:
        """Of all together, now."""
        return self._used.total()

    @property
    def num_waiting(self) -> int:
        """Of those who wait, now."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def taken(self, who: str, amount: int) -> AsyncIterator[None]:
        """Hold an amount, once there is room; raises ApiError if too many of this one's wait already."""
        amount = min(amount, self._total)
        await self._take(who, amount)
        try:
            yield
        finally:
            self._give_back(who, amount)

    async def _take(self, who: str, amount: int) -> None:
        if not self._waiting.num_of(who) and self._fits(who, amount):
            self._used[who] += amount
            return
        if self._waiting.num_of(who) >= self._max_waiting - self.num_waiting:
            message = f"{self.num_waiting} {self._what} wait already, too many of them this caller's"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=_RETRY_S)
        wait = _RoomWait(amount, asyncio.get_running_loop().create_future())
        self._waiting.add(who, wait)
        try:
            await wait.granted
        except asyncio.CancelledError:
            if wait.granted.cancelled():
                self._waiting.remove(who, wait)
            else:
                self._give_back(who, amount)
            raise

    def _fits(self, who: str, amount: int) -> bool:
        return self._used[who] + amount <= self._total - self._used.total()

    def _give_back(self, who: str, amount: int) -> None:
        self._used[who] -= amount
        if not self._used[who]:
            del self._used[who]
        while (owner := self._next()) is not None:
            wait = self._waiting.pop_of(owner)
            self._used[owner] += wait.amount
            wait.granted.set_result(None)

    def _next(self) -> str | None:
        """Who has the next turn, of those for whom there is room."""
        turns = self._waiting
        return next((each for each in turns.tenants() if self._fits(each, turns.first_of(each).amount)), None)
