"""Server-sent events: a response that is written once for all that has arrived, and ends with a slow reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from gateway_svc.http.reading import ANSWER_HEADERS
from gateway_svc.http.sending import has_taken_all, taken

_NO_TEXT = "replace"
"""What a client repeats, such as metadata, may hold halves of surrogate pairs."""
DONE = b"data: [DONE]\n\n"
_SHORT_BYTES = 16 * 1024
"""Less than what a transport takes before it lets writers wait."""
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events
}


dumps: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""JSON in its shortest form."""


def data_event(value: Any) -> bytes:
    """An event of OpenAI's older APIs, which has data alone."""
    return f"data: {dumps(value)}\n\n".encode(errors=_NO_TEXT)


def named_event(value: dict[str, Any]) -> bytes:
    """An event with the name that its data have as type."""
    return f"event: {value['type']}\ndata: {dumps(value)}\n\n".encode(errors=_NO_TEXT)


class EventStream:
    """The response of one request. Headers go out with the first events, so that an early error has its own status."""

    def __init__(self, request: web.Request, timeout_s: float) -> None:
        """timeout_s: how long a client may take nothing."""
        self._request = request
        self._timeout_s = timeout_s
        self._response: web.StreamResponse | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the status has been sent."""
        return self._response is not None

    async def write(self, events: bytes) -> None:
        """Write events; raises SlowReaderError, and ConnectionError for a client that has gone."""
        if not events:
            return
        response = self._response
        if response is None:
            response = web.StreamResponse(headers=_HEADERS)
            response.headers.update(self._request.get(ANSWER_HEADERS, {}))
            await response.prepare(self._request)
            self._response = response
        if len(events) <= _SHORT_BYTES and has_taken_all(self._request):
            await response.write(events)  # it does not wait
        else:
            await taken(self._request, response.write(events), self._timeout_s)

    async def end(self) -> web.StreamResponse:
        """End the response, and return it; raises as `write`."""
        assert self._response is not None
        await taken(self._request, self._response.write_eof(), self._timeout_s)
        return self._response
