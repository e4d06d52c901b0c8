"""`cadenza tenants`: adds tenants to a tenants file, gives them tokens and takes tokens away."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cadenza.errors import OptionError
from cadenza_common.settings.extras import install_command

if TYPE_CHECKING:
    from cadenza_cli.admin.tenants_editor import TenantsEditor

HELP = """Manage the tenants of a server: who may use it, and how much.

\b
Examples:
  cadenza tenants add gold --file tenants.toml --weight 4
  cadenza tenants add ops --file tenants.toml --admin
  cadenza tenants token gold --file tenants.toml      a second token, to replace the first
  cadenza tenants revoke gold 3fa9 --file tenants.toml
  cadenza tenants list --file tenants.toml

The file holds hashes of tokens. A token itself is printed once, on stdout, and cannot be shown again. A scheduler that
was started with --tenants FILE reads it again within a second.
"""
EPILOG = "Exit codes: 0 success, 2 wrong options or a wrong file."
_COLUMNS = (
    "tenant", "tokens", "weight", "requests", "queued tokens", "tokens/min", "priority", "shares", "adapters", "",
)  # fmt: skip
_HASH_CHARS = 8

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the tenant.", show_default=False)]
File = Annotated[str, typer.Option("--file", metavar="FILE", help="The tenants file.", show_default=False)]


def make_group(**settings: Any) -> typer.Typer:
    """The commands below `cadenza tenants`."""
    group = typer.Typer(help=HELP, epilog=EPILOG, add_completion=False, rich_markup_mode=None, **settings)
    for name, command in (("add", add), ("token", token), ("revoke", revoke), ("list", list_tenants)):
        group.command(name, epilog=EPILOG)(command)
    return group


def add(
    name: Name,
    file: File,
    weight: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Its share under --order fair.  [default: 1]")
    ] = None,
    max_requests: Annotated[int | None, typer.Option(metavar="INTEGER", help="Most unfinished requests.")] = None,
    max_queued_tokens: Annotated[
        int | None, typer.Option(metavar="INTEGER", help="Most prompt tokens of requests that wait to begin.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(metavar="INTEGER", help="Most prompt and output tokens a minute.")
    ] = None,
    max_priority: Annotated[
        int | None, typer.Option(metavar="INTEGER", help="Smallest priority that its requests may have.")
    ] = None,
    shared_prefixes: Annotated[
        str | None, typer.Option(metavar="NAME", help="Share cached prefixes with the tenants of this name.")
    ] = None,
    adapters: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="LoRA adapters that it may use, with commas and * and ?.  [default: all]"),
    ] = None,
    may_load_adapters: Annotated[
        bool, typer.Option("--may-load-adapters", help="It may load and unload those adapters.")
    ] = False,
    may_name_tenants: Annotated[
        bool,
        typer.Option("--may-name-tenants", help="Its sessions may carry requests of other tenants: for a gateway."),
    ] = False,
    admin: Annotated[bool, typer.Option("--admin", help="It sees everything, and may drain the server.")] = False,
) -> None:
    """Add a tenant with one token; the file is made if there is none."""
    values = {
        "weight": weight,
        "max_requests": max_requests,
        "max_queued_tokens": max_queued_tokens,
        "tokens_per_minute": tokens_per_minute,
        "max_priority": max_priority,
        "shared_prefixes": shared_prefixes,
        "adapters": None if adapters is None else [each for each in map(str.strip, adapters.split(",")) if each],
        "may_load_adapters": may_load_adapters or None,
        "may_name_tenants": may_name_tenants or None,
        "admin": admin or None,
    }
    made = _editor(file, create=True).add_tenant(name, {key: each for key, each in values.items() if each is not None})
    _print_token(name, made)


def token(name: Name, file: File) -> None:
    """Give a tenant one more token."""
    _print_token(name, _editor(file).add_token(name))


def revoke(
    name: Name,
    prefix: Annotated[str, typer.Argument(metavar="HASH", help="First digits of the token's hash, as `list` shows.")],
    file: File,
) -> None:
    """Take a token away: new requests with it are refused, and running ones go on to their end."""
    gone = _editor(file).revoke(name, prefix)
    sys.stdout.write(f"{name} no longer has the token {_short(gone)}\n")


def list_tenants(file: File) -> None:
    """Print the tenants with their limits and the hashes of their tokens."""
    from rich.console import Console
    from rich.table import Table

    from cadenza_cli.text import PIPE_CELLS

    editor = _editor(file)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for tenant in editor.tenants.by_name.values():
        limits = (tenant.max_requests, tenant.max_queued_tokens, tenant.tokens_per_minute, tenant.max_priority)
        table.add_row(
            tenant.name,
            " ".join(map(_short, editor.hashes(tenant.name))) or "-",
            f"{tenant.weight:g}",
            *("-" if limit is None else str(limit) for limit in limits),
            tenant.shared_prefixes or "-",
            " ".join(tenant.adapters) or "-",
            _rights(tenant),
        )
    width = None if Console().is_terminal else PIPE_CELLS
    Console(width=width, emoji=False, markup=False, highlight=False).print(table)


def _rights(tenant: Any) -> str:
    """What it may do beyond generating; an admin may load adapters."""
    loads = "admin" if tenant.admin else "loads adapters" if tenant.may_load_adapters else ""
    return ", ".join(filter(None, (loads, "names tenants" if tenant.may_name_tenants else "")))


def _editor(path: str, *, create: bool = False) -> TenantsEditor:
    if find_spec("pydantic") is None or find_spec("scheduler_svc") is None:
        raise OptionError(f"the scheduler is not installed, which reads the file: {install_command('scheduler')}")
    from cadenza_cli.admin.tenants_editor import TenantsEditor

    return TenantsEditor.open(path, create=create)


def _print_token(name: str, made: str) -> None:
    sys.stdout.write(f"{made}\n")
    sys.stdout.flush()
    sys.stderr.write(f"the token of {name}, which is not shown again; programs take it from CADENZA_TOKEN\n")


def _short(text: str) -> str:
    from scheduler_svc.tenants.tenant import HASH_PREFIX

    return text.removeprefix(HASH_PREFIX)[:_HASH_CHARS]
