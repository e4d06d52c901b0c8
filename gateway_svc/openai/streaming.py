"""The loop of a streamed answer: what has arrived becomes events, which are written at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from aiohttp import web

from cadenza.errors import CadenzaError
from cadenza.outputs import RequestOutput
from gateway_svc.http.errors import ApiError, api_error
from gateway_svc.http.events import EventStream
from gateway_svc.openai.failures import whole
from gateway_svc.scheduler.generation import Generation
from gateway_svc.scheduler.inbox import Taken
from gateway_svc.state import STATE


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


class AnswerEvents(Protocol):
    """The events of one streamed answer, from its beginning to its end."""

    def begin(self) -> bytes:
        """The first ones."""

    def deltas(self, taken: Taken) -> bytes:
        """Those of new deltas."""

    def end(self) -> bytes:
        """The last ones."""

    def failed(self, error: ApiError) -> bytes:
        """Those of an answer that fails after its beginning."""


async def answer_one(
    request: web.Request,
    generation: Generation,
    *,
    events: AnswerEvents | None,
    whole_answer: Callable[[RequestOutput], dict[str, Any]],
) -> web.StreamResponse:
    """Run a request of one prompt, and answer it as these events; None: as one object. Raises as `stream_answer`."""
    async with generation:
        if events is None:
            (result,) = whole(await generation.results())
            return web.json_response(whole_answer(result))
        return await stream_answer(
            request, generation, begin=events.begin, events_of=events.deltas, end=events.end, failed=events.failed
        )
