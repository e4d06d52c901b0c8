"""Follows a server: a snapshot at the end of each interval, or `Lost` while the server cannot be reached."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator

from cadenza.async_client import AsyncClient
from cadenza.errors import (
    CadenzaError,
    DeadlineError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
from cadenza.steps.watch import StepWatch, watch_steps
from cadenza_cli.top.figures import Lost, ServerFigures
from cadenza_cli.top.meter import Meter

_ANSWER_S = 5.0
"""A server that has not answered for this long counts as lost."""
_TAKE_S = 1.0
"""Interval of processing records: a full record is large, so few are kept."""


async def observe(target: str, *, interval_s: float, window_s: float) -> AsyncGenerator[ServerFigures | Lost, None]:
    """Observe a server forever: a snapshot for each interval, or `Lost`, after which the connection is retried.

    Figures are over at least `window_s`; 0: over one interval. Raises UnsupportedError if the server is not a Cadenza
    scheduler, UnauthenticatedError and PermissionDeniedError if it does not take the token.
    """
    last_answer_s = time.monotonic()
    while True:
        try:
            async with (
                AsyncClient(target) as client,
                contextlib.aclosing(_snapshots(client, interval_s, window_s)) as observation,
            ):
                async for snapshot in observation:
                    last_answer_s = time.monotonic()
                    yield snapshot
        except (UnsupportedError, UnauthenticatedError, PermissionDeniedError):
            raise
        except CadenzaError as error:
            yield Lost(error, time.monotonic() - last_answer_s)
        await asyncio.sleep(interval_s)


async def _snapshots(client: AsyncClient, interval_s: float, window_s: float) -> AsyncGenerator[ServerFigures, None]:
    async with contextlib.AsyncExitStack() as stack:
        async with _in_time(client.target):
            watch = await stack.enter_async_context(watch_steps(client))
            model = (await client.model_info()).model
            meter = Meter(await client.server_info(), window_s, model=model)
        while await _passed(interval_s, watch, meter):
            async with _in_time(client.target):
                info = await client.server_info()
            meter.add(watch.take(), watch.num_dropped)
            yield meter.snapshot(info)
    raise UnavailableError(f"{client.target} has ended the watch of its steps")


async def _passed(interval_s: float, watch: StepWatch, meter: Meter) -> bool:
    """Wait for the interval to pass; returns False as soon as the watch has ended."""
    end_s = time.monotonic() + interval_s
    while (rest_s := end_s - time.monotonic()) > 0:
        if await watch.wait_end(min(rest_s, _TAKE_S)):
            return False
        meter.add(watch.take(), watch.num_dropped)
    return True


@contextlib.asynccontextmanager
async def _in_time(target: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_ANSWER_S):
            yield
    except TimeoutError:
        raise DeadlineError(f"{target} has not answered for {_ANSWER_S:g} s") from None
