"""When a client goes on after a lost connection, and how long it tries."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from cadenza.errors import CadenzaError, DamagedStreamError, UnavailableError, has_server_details
from cadenza.v1 import generation_pb2

RECONNECT_TIMEOUT_S = 30.0
"""Default time for which a client tries to reach a server again."""
_GRACE_FACTOR = 2
"""The server may notice the loss before the client does, and the last attempt may take its time."""
MAX_GRACE_S = 3600.0
"""Longest grace that a server takes."""
_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 2.0
_MAX_DOUBLINGS = 10
_Message = TypeVar("_Message", generation_pb2.GenerateResponse, generation_pb2.SessionResponse)
_MAX_TAKEOVERS = 3
_MAX_DAMAGED = 10


def checked_timeout(value: object) -> float:
    """Return a reconnect_timeout_s; raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"reconnect_timeout_s must be 0 or more seconds, not {value!r}")
    return float(value)


def grace_s(reconnect_timeout_s: float) -> float:
    """The resume_grace_s of requests of a client that tries for this long."""
    return min(_GRACE_FACTOR * reconnect_timeout_s, MAX_GRACE_S)


def is_lost_connection(error: grpc.aio.AioRpcError) -> bool:
    """Whether the call may go on elsewhere or later: the connection broke, or the server starts, drains or stops."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return True
    # gRPC itself says this of streams that a dying server or a broken network has reset.
    is_reset = error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)
    is_removed = error.code() is grpc.StatusCode.UNKNOWN and "Stream removed" in (error.details() or "")
    return (is_reset or is_removed) and not has_server_details(error)


def whole_message(message: object, kind: type[_Message], ended: str) -> _Message:
    """The message that a stream has brought; raises UnavailableError with the text `ended` at its end.

    gRPC returns None for a message that cannot be parsed: that raises DamagedStreamError.
    """
    if isinstance(message, kind):
        return message
    raise DamagedStreamError("a message cannot be read") if message is None else UnavailableError(ended)


class Attempts:
    """Decides after each lost connection whether to try again, and waits before.

    The waits grow exponentially with full jitter (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog,
    2015), so that the clients of a restarted server do not come all at once. The time limit counts from the loss and
    starts anew with each response.
    """

    def __init__(
        self,
        timeout_s: float,
        keeps_trying: Callable[[], bool],
        on_response: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`keeps_trying`: whether there is a point in waiting for the server."""
        self._clock = clock
        self._sleep = sleep
        self._timeout_s = timeout_s
        self._keeps_trying = keeps_trying
        self._report = on_response
        self._lost_at: float | None = None
        self._count = 0
        self._num_takeovers = 0
        self._num_damaged = 0
        self.has_reconnected = False

    def on_response(self) -> None:
        """The server has sent something: the connection is there."""
        self._lost_at = None
        self._count = 0
        self._report()

    def on_damage(self) -> None:
        """Something has damaged a stream: after several times there is no other attempt."""
        self._num_damaged += 1

    def next_delay(self) -> float | None:
        """Seconds to wait before the next attempt; None if there is to be none."""
        now = self._clock()
        if self._lost_at is None:
            self._lost_at = now
        left_s = self._lost_at + self._timeout_s - now
        if left_s <= 0 or self._num_damaged > _MAX_DAMAGED or not self._keeps_trying():
            return None
        longest = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2**self._count)
        self._count = min(self._count + 1, _MAX_DOUBLINGS)
        self.has_reconnected = True
        return min(left_s, random.uniform(0, longest))

    async def wait(self, error: CadenzaError) -> None:
        """Wait before the next attempt; raises `error` if there is to be none."""
        delay_s = self.next_delay()
        if delay_s is None:
            raise error from None
        await self._sleep(delay_s)
        if not self._keeps_trying():
            raise error from None

    def takes_back(self, code: grpc.StatusCode | None) -> bool:
        """Whether to take over a request that another stream has taken over: it may be this client's own.

        What a client sent before it lost its connection may reach a busy server after what it sent on the next one.
        """
        if code is not grpc.StatusCode.ABORTED or not self.has_reconnected:
            return False
        self._num_takeovers += 1
        return self._num_takeovers <= _MAX_TAKEOVERS
