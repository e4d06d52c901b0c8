"""`cadenza drain`: lets a server finish its requests and take no new ones."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from cadenza.errors import OptionError
from cadenza_cli.admin.calls import admin, check_timeout, drained, explained, requests
from cadenza_cli.generate import Target
from cadenza_cli.service_args import serving

HELP = """Let a server finish its requests, and take no new ones.

\b
Examples:
  cadenza drain                    until the server here has no requests left
  cadenza drain --timeout-s 20     20 seconds at most, as in a preStop hook
  cadenza drain --resume           take new requests again

New requests are refused with UNAVAILABLE, and health is NOT_SERVING, so that load balancers send them elsewhere. This
lasts until --resume or a restart, also after the timeout or Ctrl-C. A scheduler that gets SIGTERM drains by itself, for
--drain-timeout-s.
"""
EPILOG = "Exit codes: 0 no request is left, 1 some are left, or no server; 2 wrong options, 130 Ctrl-C."


def drain(
    target: Target = None,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout-s", metavar="SECONDS", help="Wait this long at most.  [default: until it is empty]"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="End a drain: take new requests again.")] = False,
) -> None:
    """Run the command; raises CadenzaError, and typer.Exit if requests are left."""
    check_timeout(timeout_s)
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
        sys.stdout.write(f"{address} has {requests(num_left)} left after {timeout_s:g} s, and takes no new ones\n")
        raise typer.Exit(1)
    sys.stdout.write(f"{address} is empty and takes no new requests\n")


async def _drain(address: str, timeout_s: float | None) -> int:
    """Drain the server and show what is left; returns the number of unfinished requests."""
    from cadenza.async_client import AsyncClient
    from cadenza.v1 import admin_pb2

    async with AsyncClient(address, reconnect_timeout_s=0) as client:

        async def num_left() -> int:
            load = (await client.server_info()).load
            return load.num_running + load.num_waiting + load.num_swapped

        call = admin(client).Drain(admin_pb2.DrainRequest(timeout_s=timeout_s))
        return await drained(call, address, client.target, num_left)


async def _resume(address: str) -> None:
    from cadenza.async_client import AsyncClient
    from cadenza.v1 import admin_pb2

    async with AsyncClient(address, reconnect_timeout_s=0) as client:
        await explained(admin(client).Resume(admin_pb2.ResumeRequest()), address)
