"""Calls of AdminService by commands: the stub, errors, and a line that shows the progress of a drain."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from cadenza.errors import OptionError

if TYPE_CHECKING:
    from cadenza.async_client import AsyncClient

_LOOK_S = 0.5


def check_timeout(timeout_s: float | None) -> None:
    """Raise OptionError for a value of --timeout-s that is no time."""
    if timeout_s is not None and not 0 <= timeout_s < math.inf:
        raise OptionError(f"option timeout-s: must be 0 or more seconds, not {timeout_s:g}")


def admin(client: AsyncClient) -> Any:
    """The stub of the server's AdminService."""
    from cadenza.v1.admin_pb2_grpc import AdminServiceStub

    return client.stub_of(AdminServiceStub)


async def explained(call: Any, address: str) -> Any:
    """The response of a call; raises its CadenzaError."""
    import grpc

    from cadenza.errors import from_rpc_error

    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, address) from None


async def drained(call: Any, address: str, what: str, num_left: Callable[[], Awaitable[int]]) -> int:
    """The number of unfinished requests when a drain has ended; meanwhile a terminal shows how many are left.

    `what` is drained at the server `address`; `num_left` counts its requests.
    """
    showing = asyncio.create_task(_show(what, num_left)) if sys.stderr.isatty() else None
    try:
        return int((await explained(call, address)).num_remaining)
    finally:
        if showing is not None:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)


def requests(count: int) -> str:
    """A number of requests in words."""
    return f"{count} request{'s' * (count != 1)}"


async def _show(what: str, num_left: Callable[[], Awaitable[int]]) -> None:
    """Keep one line on stderr up to date; removes it at the end."""
    began = time.monotonic()
    try:
        while True:
            left = requests(await num_left())
            sys.stderr.write(f"\r\x1b[Kdraining {what}: {left} left, {time.monotonic() - began:.0f} s")
            sys.stderr.flush()
            await asyncio.sleep(_LOOK_S)
    finally:
        sys.stderr.write("\r\x1b[K")
