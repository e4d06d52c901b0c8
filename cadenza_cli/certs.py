"""`cadenza certs`: makes a development CA, and certificates for the services and their clients."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cadenza.errors import OptionError
from cadenza_launcher.certs import DAYS, CertsError, run

HELP = """Make certificates for TLS between clients, scheduler and executors.

\b
Examples:
  cadenza certs certs                               for services on this machine
  cadenza certs certs --host gpu1 --host 10.0.0.7   for services on others too
  cadenza certs certs                               again: renews the certificates

Writes a certificate authority (CA) into DIR/ca, and a folder for each party: scheduler, executor, client, with its
certificate, its key, and the CA's certificate. Keys can be read by their owner alone. Run again with the same --host
options, it makes new certificates by the same CA; services and clients read them again without a restart.
"""
EPILOG = "Exit codes: 0 success, 1 a file cannot be written, 2 wrong options."


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the files.", show_default=False)],
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Name or address of a service, besides localhost; may be given several times."
        ),
    ] = None,
    days: Annotated[float, typer.Option(metavar="NUMBER", help="How long the certificates are valid.")] = DAYS,
    new_ca: Annotated[
        bool,
        typer.Option("--new-ca", help="Make a new CA, trusted beside the old one; the next run signs with it."),
    ] = False,
) -> None:
    """Run the command; raises OptionError, typer.Exit."""
    try:
        sys.stdout.write(run(folder, host or [], days, new_ca=new_ca))
    except CertsError as error:
        if str(error).startswith("option "):
            raise OptionError(str(error)) from None
        sys.stderr.write(f"cadenza: {error}\n")
        raise typer.Exit(1) from None
