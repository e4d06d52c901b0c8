"""`cadenza executors`: lists the executors of a running server, adds and drains them, and takes them away."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cadenza.errors import OptionError, PermissionDeniedError
from cadenza_cli.admin.calls import admin, check_timeout, drained, explained, requests
from cadenza_cli.connection import with_connection, with_credentials
from cadenza_cli.generate import Target
from cadenza_cli.service_args import serving

if TYPE_CHECKING:
    from cadenza.async_client import AsyncClient
    from cadenza.info import ExecutorInfo

HELP = """List, add, drain and remove the executors of a running server.

\b
Examples:
  cadenza executors list
  cadenza executors add 10.0.0.7:50052      takes requests once it answers
  cadenza executors drain 10.0.0.7:50052    moves its requests to others
  cadenza executors remove 10.0.0.7:50052

No token is lost, repeated or changed: requests go on at other executors. What is changed here lasts until the scheduler
is started again: its option --executor names the executors that it starts with.
"""
EPILOG = "Exit codes: 0 success, 1 requests are left, no server or a refusal, 2 wrong options, 130 Ctrl-C."
_LIST_HELP = """Print a line for each executor of a server.

States: serving; draining: takes no new requests; stalled: a step runs for much longer than it should; lost: does not
answer; refused: answers, but cannot serve here. Steps, tokens and prefix hits are counted since the server's start.
Of a GPU's memory another line has what its parts take, as measured, beside what was computed before.
"""

Address = Annotated[
    str, typer.Argument(metavar="HOST:PORT", help="Address of the executor, as `list` shows it.", show_default=False)
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout-s", metavar="SECONDS", help="Wait this long at most.  [default: until it is empty]"),
]


def make_group(**settings: Any) -> typer.Typer:
    """The commands below `cadenza executors`."""
    group = typer.Typer(help=HELP, epilog=EPILOG, add_completion=False, rich_markup_mode=None, **settings)
    group.command("list", help=_LIST_HELP, epilog=EPILOG)(with_connection(with_credentials(list_executors)))
    for name, command in (("add", add), ("drain", drain), ("resume", resume), ("remove", remove)):
        group.command(name, epilog=EPILOG)(with_connection(with_credentials(command)))
    return group


def list_executors(
    target: Target = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on a line for each executor.")] = False,
) -> None:
    """Print the executors of a server."""
    with serving(target, None, None, {}) as server:
        executors = asyncio.run(_executors(server))
    if as_json:
        sys.stdout.write("".join(f"{_json_line(each)}\n" for each in executors))
    else:
        _print_table(executors)


def add(address: Address, target: Target = None) -> None:
    """Add an executor. It takes requests once it answers."""
    address = _checked(address)
    _call("AddExecutor", address, target)
    sys.stdout.write(f"{address} is added and takes requests once it answers\n")


def drain(address: Address, target: Target = None, timeout_s: Timeout = None) -> None:
    """Give an executor no new requests, move its requests to other executors, and wait until it has none.

    Requests that no other executor can hold finish there.
    """
    check_timeout(timeout_s)
    address = _checked(address)
    with serving(target, None, None, {}) as server:
        try:
            num_left = asyncio.run(_drain(server, address, timeout_s))
        except KeyboardInterrupt:
            sys.stderr.write(f"{address} still takes no new requests; `cadenza executors resume {address}` ends that\n")
            raise
    if num_left:
        sys.stdout.write(f"{address} has {requests(num_left)} left after {timeout_s:g} s, and takes no new ones\n")
        raise typer.Exit(1)
    sys.stdout.write(f"{address} is empty and takes no new requests\n")


def resume(address: Address, target: Target = None) -> None:
    """End the drain of an executor."""
    address = _checked(address)
    _call("ResumeExecutor", address, target)
    sys.stdout.write(f"{address} takes new requests again\n")


def remove(address: Address, target: Target = None) -> None:
    """End the session with an executor, and forget it. Its process goes on running."""
    address = _checked(address)
    _call("RemoveExecutor", address, target)
    sys.stdout.write(f"{address} is removed\n")


def _checked(address: str) -> str:
    """The address in the form in which the scheduler knows it."""
    from cadenza_common.wire.transport import EXECUTOR_PORT, format_address, parse_address

    if not address.strip():
        raise OptionError("executor: must be HOST:PORT")
    try:
        return format_address(*parse_address(address, default_port=EXECUTOR_PORT))
    except ValueError as error:
        raise OptionError(f"executor: {error}") from None


async def _executors(server: str) -> list[ExecutorInfo]:
    from cadenza.async_client import AsyncClient

    async with AsyncClient(server, reconnect_timeout_s=0) as client:
        info = await client.server_info()
    if not info.executors:
        raise PermissionDeniedError("the executors of a server with tenants are shown to a tenant with admin = true")
    return info.executors


def _call(method: str, address: str, target: str | None) -> None:
    """Call a method of AdminService that names an executor."""
    from cadenza.v1 import admin_pb2

    async def call(server: str) -> None:
        from cadenza.async_client import AsyncClient

        async with AsyncClient(server, reconnect_timeout_s=0) as client:
            request = getattr(admin_pb2, f"{method}Request")(target=address)
            await explained(getattr(admin(client), method)(request), server)

    with serving(target, None, None, {}) as server:
        asyncio.run(call(server))


async def _drain(server: str, address: str, timeout_s: float | None) -> int:
    """Drain an executor and show what is left; returns the number of requests that it still holds."""
    from cadenza.async_client import AsyncClient
    from cadenza.v1 import admin_pb2

    async with AsyncClient(server, reconnect_timeout_s=0) as client:
        request = admin_pb2.DrainExecutorRequest(target=address, timeout_s=timeout_s)
        call = admin(client).DrainExecutor(request)
        return await drained(call, server, address, lambda: _num_left(client, address))


async def _num_left(client: AsyncClient, address: str) -> int:
    executors = (await client.server_info()).executors
    return sum(each.num_running + each.num_swapped for each in executors if each.target == address)


def _json_line(info: ExecutorInfo) -> str:
    fields = asdict(info) | {"state": info.state}
    fields["incarnation"] = f"{info.incarnation:016x}"  # not every JSON parser supports 64-bit integers
    return json.dumps(fields)


def _print_table(executors: Sequence[ExecutorInfo]) -> None:
    """The table, and why executors are refused or stalled; in a pipe, a line is never wrapped."""
    from rich.console import Console
    from rich.table import Table

    from cadenza_cli.text import PIPE_CELLS, memory_parts, printable

    is_known = Console().is_terminal or os.environ.get("COLUMNS", "").isdigit()
    console = Console(width=None if is_known else PIPE_CELLS, emoji=False, markup=False, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("executor", "state", "device"):
        table.add_column(name, overflow="fold")
    for name in ("KV blocks", "running", "waiting", "swapped", "steps", "tokens", "prefix hits"):
        table.add_column(name, justify="right", overflow="fold")
    for info in executors:
        table.add_row(printable(info.target), info.state, printable(info.device), *_figures(info))
    console.print(table)
    for info in executors:
        if info.reason:
            console.print(f"{info.target} is {info.state}: {printable(info.reason)}", soft_wrap=True)
        if info.memory:
            console.print(f"{info.target} has of its GPU: {', '.join(memory_parts(info.memory))}", soft_wrap=True)


def _figures(info: ExecutorInfo) -> list[str]:
    from cadenza_cli.top.lanes import share

    hits = share(info.num_prefix_hits / info.num_prefix_queries) if info.num_prefix_queries else "-"
    counts = (info.num_running, info.num_waiting, info.num_swapped, info.num_steps, info.num_output_tokens)
    blocks = f"{info.num_used_device_blocks:,}/{info.num_device_blocks:,}" if info.num_device_blocks else "-"
    return [blocks, *(f"{each:,}" for each in counts), hits]
