"""`cadenza drain`: lets a server finish its requests and take no new ones."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cadenza.cli.generate import Target
from cadenza.cli.service_args import serving
from cadenza.errors import OptionError

if TYPE_CHECKING:
    from cadenza.async_client import AsyncClient

HELP = """Let a server finish its requests, and take no new ones.

\b
Examples:
  cadenza drain                    until the server at port 50051 here has no requests left
  cadenza drain --timeout-s 20     20 seconds at most, as in a preStop hook
  cadenza drain --resume           take new requests again

New requests are refused with UNAVAILABLE, and health is NOT_SERVING, so that load balancers send them elsewhere. This
lasts until --resume or a restart, also after the timeout or Ctrl-C. A scheduler that gets SIGTERM drains by itself, for
--drain-timeout-s.
"""
EPILOG = "Exit codes: 0 no request is left, 1 some are left, or no server; 2 wrong options, 130 Ctrl-C."
_LOOK_S = 0.5


def drain(
    target: Target = None,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout-s", metavar="SECONDS", help="Wait this long at most.  [default: until it is empty]"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="End a drain: take new requests again.")] = False,
) -> None:
    """Run the command; raises CadenzaError, and typer.Exit if requests are left."""
    if timeout_s is not None and not 0 <= timeout_s < math.inf:
        raise OptionError(f"option timeout-s: must be 0 or more seconds, not {timeout_s:g}")
    if resume and timeout_s is not None:
        raise OptionError("option timeout-s: --resume does not wait")
    with serving(target, None, None, {}) as address:
        if resume:
            asyncio.run(_resume(address))
            sys.stdout.write(f"{address} takes new requests again\n")
            return
        try:
            num_left = asyncio.run(_drain(address, timeout_s))
        except KeyboardInterrupt:
            sys.stderr.write(f"{address} still takes no new requests; `cadenza drain --resume` ends that\n")
            raise
    if num_left:
        sys.stdout.write(f"{address} has {_requests(num_left)} left after {timeout_s:g} s, and takes no new ones\n")
        raise typer.Exit(1)
    sys.stdout.write(f"{address} is empty and takes no new requests\n")


async def _drain(address: str, timeout_s: float | None) -> int:
    """Drain the server and show what is left; returns the number of unfinished requests."""
    from cadenza.async_client import AsyncClient
    from cadenza.v1 import admin_pb2

    async with AsyncClient(address, reconnect_timeout_s=0) as client:
        call = _admin(client).Drain(admin_pb2.DrainRequest(timeout_s=timeout_s))
        showing = asyncio.create_task(_show(client)) if sys.stderr.isatty() else None
        try:
            return int((await _explained(call, address)).num_remaining)
        finally:
            if showing is not None:
                showing.cancel()
                await asyncio.gather(showing, return_exceptions=True)


async def _show(client: AsyncClient) -> None:
    """Keep one line on stderr up to date; removes it at the end."""
    began = time.monotonic()
    try:
        while True:
            load = (await client.server_info()).load
            num_left = load.num_running + load.num_waiting + load.num_swapped
            waited = f"{time.monotonic() - began:.0f} s"
            sys.stderr.write(f"\r\x1b[Kdraining {client.target}: {_requests(num_left)} left, {waited}")
            sys.stderr.flush()
            await asyncio.sleep(_LOOK_S)
    finally:
        sys.stderr.write("\r\x1b[K")


async def _resume(address: str) -> None:
    from cadenza.async_client import AsyncClient
    from cadenza.v1 import admin_pb2

    async with AsyncClient(address, reconnect_timeout_s=0) as client:
        await _explained(_admin(client).Resume(admin_pb2.ResumeRequest()), address)


def _admin(client: AsyncClient) -> Any:
    from cadenza.v1.admin_pb2_grpc import AdminServiceStub

    return AdminServiceStub(client.channel)


async def _explained(call: Any, address: str) -> Any:
    """The response of a call; raises its CadenzaError."""
    import grpc

    from cadenza.errors import from_rpc_error

    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, address) from None


def _requests(count: int) -> str:
    return f"{count} request{'s' * (count != 1)}"
