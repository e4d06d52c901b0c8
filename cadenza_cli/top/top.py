"""`cadenza top`: a live view of a running server."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from cadenza.errors import OptionError
from cadenza_cli.generate import Target
from cadenza_cli.service_args import serving

if TYPE_CHECKING:
    from cadenza_cli.top.figures import Lost, ServerFigures

HELP = """Watch a running server.

\b
Examples:
  cadenza top                      the server at port 50051 here, until q
  cadenza top --target 10.0.0.5:50051 --interval 5
  cadenza top --once               one snapshot, over one interval
  cadenza top --json > top.jsonl   a line for each interval

Shows queues, tokens/s, time to first token (TTFT), and KV cache use; bars show the last intervals. Keys: q quits, d
shows details (steps, plans, sessions, preemptions), t shows tenants and faults. The live view covers at least the last
5 seconds, a line of --json its interval. If the server goes away, the command waits for it. A server that is not there
at the start is an error with --once, --json or in a pipe. A watch costs the scheduler a record for each step.
"""
EPILOG = "Exit codes: 0 success (q, --once), 1 no server or not a Cadenza server, 2 wrong options, 130 Ctrl-C."
_LIVE_WINDOW_S = 5.0
_INTERVALS_S = (0.1, 600.0)

Show = Callable[["ServerFigures | Lost"], None]


def top(
    target: Target = None,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Time between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one snapshot after one interval, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on a line for each interval.")] = False,
) -> None:
    """Run the command; raises CadenzaError."""
    if not _INTERVALS_S[0] <= interval <= _INTERVALS_S[1]:
        raise OptionError("option interval: must be {:g} to {:g} seconds, not {:g}".format(*_INTERVALS_S, interval))
    with serving(target, None, None, {}) as address:
        if as_json:
            asyncio.run(follow(address, _lines(address), interval_s=interval, window_s=0.0, once=once, waits=False))
        else:
            _pictures(address, interval, once=once)


async def follow(
    target: str, show: Show, *, interval_s: float, window_s: float, once: bool, waits: bool = True
) -> None:
    """Show observations of a server, forever or `once`.

    An unreachable server raises its error with `once`, and at the first observation unless the command `waits` for it.
    """
    waits = waits and not once
    from cadenza_cli.top.figures import Lost
    from cadenza_cli.top.watching import observe

    async with contextlib.aclosing(observe(target, interval_s=interval_s, window_s=window_s)) as observed:
        async for observation in observed:
            if isinstance(observation, Lost) and not waits:
                raise observation.error
            waits = not once
            show(observation)
            if once:
                return


def _lines(target: str) -> Show:
    from cadenza_cli.top.figures import json_line

    def show(observation: ServerFigures | Lost) -> None:
        sys.stdout.write(json_line(observation, target=target, time_s=time.time()) + "\n")
        sys.stdout.flush()

    return show


def _pictures(target: str, interval_s: float, *, once: bool) -> None:
    """Redraw the terminal until a key ends it, or print one view below the other."""
    from cadenza_cli.load.results import tables_console
    from cadenza_cli.top.screen import TopScreen
    from cadenza_cli.top.view import TopView

    console = tables_console()
    view = TopView(target, ascii_only="utf" not in console.encoding.lower())
    if not once and console.is_terminal and not console.is_dumb_terminal:
        screen = TopScreen(console, view)
        observing = partial(follow, target, screen.show, interval_s=interval_s, window_s=_LIVE_WINDOW_S, once=False)
        asyncio.run(screen.run(observing))
        return

    def show(observation: ServerFigures | Lost) -> None:
        view.add(observation)
        console.print(view.whole(console.width), "", sep="\n")

    asyncio.run(follow(target, show, interval_s=interval_s, window_s=0.0, once=once, waits=False))
