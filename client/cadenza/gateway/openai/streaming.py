"""The loop of a streamed answer: what has arrived becomes events, which are written at once."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from cadenza.errors import CadenzaError
from cadenza.gateway.http.errors import ApiError, api_error
from cadenza.gateway.http.events import EventStream
from cadenza.gateway.openai.failures import whole
from cadenza.gateway.scheduler.generation import Generation
from cadenza.gateway.scheduler.inbox import Taken
from cadenza.gateway.state import STATE


async def stream_answer(
    request: web.Request,
    generation: Generation,
    *,
    events_of: Callable[[Taken], bytes],
    end: Callable[[], bytes],
    failed: Callable[[ApiError], bytes],
    begin: Callable[[], bytes] = lambda: b"",
) -> web.StreamResponse:
    """Stream an answer and return its response.

    Raises the error of a request that fails before its first output; after it, `failed` makes events of it. Text
    that comes with the failure is not written.
    """
    state = request.app[STATE]
    stream = EventStream(request, state.config.http_write_timeout_s)
    counts = state.counts
    try:
        taken = await generation.take()
        prefix = begin()
        while taken is not None:
            counts.num_deltas += len(taken)
            whole([delta for _, delta in taken])
            events = prefix + events_of(taken)
            prefix = b""
            if events:
                counts.num_writes += 1
                await stream.write(events)
            taken = await generation.take()
        await stream.write(prefix + end())
    except (CadenzaError, ApiError) as error:
        if not stream.has_begun:
            raise
        await stream.write(failed(error if isinstance(error, ApiError) else api_error(error)))
    return await stream.end()
