"""Unary calls to the scheduler: one that a restart interrupts is made again, so that it is a pause and no error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from cadenza.calls.reconnect import Attempts, is_lost_connection
from cadenza.errors import CadenzaError, from_rpc_error
from cadenza.tls_client import explained_unavailable
from cadenza_common.wire.tls import TLS

T = TypeVar("T")


class Calls:
    """Makes calls at one scheduler.

    A scheduler that never answered is not waited for: its address may be wrong. Nor is one that has been away for
    longer than a restart takes.
    """

    def __init__(self, target: str, tls: TLS | None, timeout_s: float, is_restarting: Callable[[], bool]) -> None:
        """timeout_s: how long a call is tried; is_restarting: whether a scheduler that is away may be back soon."""
        self._target = target
        self._tls = tls
        self._timeout_s = timeout_s
        self._is_restarting = is_restarting
        self.was_reached = False
        """Whether the scheduler ever answered."""

    async def once(self, call: Awaitable[T]) -> T:
        """The response of a call; raises the CadenzaError of one that fails."""
        try:
            response = await call
        except grpc.aio.AioRpcError as error:
            raise await self._explained(error) from None
        self.was_reached = True
        return response

    async def repeated(self, make: Callable[[], Awaitable[T]]) -> T:
        """The same, made again after a lost connection."""
        return await self._try(make, self._attempts())

    async def changed(
        self,
        make: Callable[[], Awaitable[object]],
        done: type[CadenzaError],
        is_done: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """The same of a call that changes something.

        done: the error of a further attempt which may say that the one before it was carried out. is_done: whether it
        was; None: there is no other reason.
        """
        attempts = self._attempts()
        try:
            await self._try(make, attempts)
        except done:
            if not attempts.has_reconnected or (is_done is not None and not await is_done()):
                raise

    def _attempts(self) -> Attempts:
        return Attempts(self._timeout_s, lambda: self.was_reached and self._is_restarting())

    async def _try(self, make: Callable[[], Awaitable[T]], attempts: Attempts) -> T:
        while True:
            try:
                response = await make()
            except grpc.aio.AioRpcError as error:
                cause = await self._explained(error)
                if not is_lost_connection(error):
                    raise cause from None
                await attempts.wait(cause)
            else:
                self.was_reached = True
                return response

    async def _explained(self, error: grpc.aio.AioRpcError) -> CadenzaError:
        return await explained_unavailable(from_rpc_error(error, self._target), self._target, self._tls)
