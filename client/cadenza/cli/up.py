"""`cadenza up`: both services, watched, until a signal."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from cadenza.errors import LocalServiceError
from cadenza.transport import SCHEDULER_PORT

HELP = (
    "Start an executor and a scheduler for a model. Prints `ready HOST:PORT` on stdout once it can serve; the logs of "
    "both go to stderr. SIGINT or SIGTERM stops both. A service that dies is started again. Options from "
    "--device on can also be set in the environment: CADENZA_BLOCK_SIZE=32."
)
_STYLES = {"executor": "cyan", "scheduler": "green", "cadenza": "bold yellow"}


def up(
    model: Annotated[str, typer.Option(help="Folder or Hugging Face hub id of the model.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = SCHEDULER_PORT,
    **options: Any,
) -> None:
    """Serve until SIGINT or SIGTERM, then exit 0; raises LocalServiceError if the services are given up."""
    from cadenza.local import LocalServices

    console = Console(stderr=True, soft_wrap=True, highlight=False)

    def log(service: str, line: str) -> None:
        console.print(Text.assemble((f"{service:9} │ ", _STYLES[service]), Text(line)))

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    with LocalServices(
        model, host=host, port=port, on_log=log, on_event=lambda text: log("cadenza", text), **options
    ) as services:
        sys.stdout.write(f"ready {services.target}\n")
        sys.stdout.flush()
        while not services.wait_failure(1.0):
            pass
        raise services.failure or LocalServiceError("the services ended")


def _stop(number: int, frame: object) -> None:
    # Stopping has its own time limits; further signals must not interrupt it and leave children behind.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(0)
