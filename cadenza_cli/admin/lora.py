"""`cadenza lora`: lists the LoRA adapters of a running server, loads them and unloads them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cadenza.errors import OptionError
from cadenza_cli.connection import with_connection, with_credentials
from cadenza_cli.generate import Target
from cadenza_cli.service_args import serving

if TYPE_CHECKING:
    from cadenza.adapters import AdapterInfo
    from cadenza.async_client import AsyncClient

T = TypeVar("T")
HELP = """List, load and unload the LoRA adapters of a running server.

\b
Examples:
  cadenza lora list
  cadenza lora load sql /adapters/sql       a folder where the executors run, below --lora-root of the scheduler
  cadenza generate --adapter sql "..."
  cadenza lora unload sql                   its requests go on

What is changed here lasts until the scheduler is started again, or longer if it has a --journal. Its option --lora
names the adapters that it starts with, and --lora-dir a folder whose adapters are loaded when a request names them.
"""
EPILOG = "Exit codes: 0 success, 1 no server or a refusal, 2 wrong options, 130 Ctrl-C."
_DIGITS = 12

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the adapter.", show_default=False)]
Folder = Annotated[str, typer.Argument(metavar="PATH", help="Its folder, as PEFT saves it.", show_default=False)]


def make_group(**settings: Any) -> typer.Typer:
    """The commands below `cadenza lora`."""
    group = typer.Typer(help=HELP, epilog=EPILOG, add_completion=False, rich_markup_mode=None, **settings)
    for name, command in (("list", list_adapters), ("load", load), ("unload", unload)):
        group.command(name, epilog=EPILOG)(with_connection(with_credentials(command)))
    return group


def list_adapters(
    target: Target = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on a line for each adapter.")] = False,
) -> None:
    """Print a line for each adapter: its name, content, requests, its state on each executor, and its folder."""
    for info in _call(target, lambda client: client.adapters()):
        sys.stdout.write(f"{json.dumps(asdict(info)) if as_json else _line(info)}\n")


def load(name: Name, path: Folder, target: Target = None) -> None:
    """Give an adapter a name, and wait until an executor has loaded it."""
    _check(name)
    info = _call(target, lambda client: client.load_adapter(name, os.path.abspath(path)))
    sys.stdout.write(f"{info.name} is loaded: content {info.content_hash[:_DIGITS]}\n")


def unload(name: Name, target: Target = None) -> None:
    """Take an adapter's name away. Its requests go on, and it is unloaded after the last one."""
    _check(name)
    _call(target, lambda client: client.unload_adapter(name))
    sys.stdout.write(f"{name} takes no new requests\n")


def _check(name: str) -> None:
    from cadenza.adapters import adapter_name

    try:
        adapter_name(name, "name")
    except ValueError as error:
        raise OptionError(str(error)) from None


def _call(target: str | None, call: Callable[[AsyncClient], Awaitable[T]]) -> T:
    async def run(server: str) -> T:
        from cadenza.async_client import AsyncClient

        async with AsyncClient(server, reconnect_timeout_s=0) as client:
            return await call(client)

    with serving(target, None, None, {}) as server:
        return asyncio.run(run(server))


def _line(info: AdapterInfo) -> str:
    from cadenza_cli.text import printable

    states = ", ".join(f"{state} at {executor}" for executor, state in info.executors.items()) or "no executor"
    error = f": {info.error}" if info.error else ""
    content = info.content_hash[:_DIGITS] or "-"
    return printable(f"{info.name}  {content}  {info.num_requests} requests  {states}{error}  {info.path}")
