"""Passes HTTP requests on to the gateway, and its answers back, as they come."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable

import aiohttp
from multidict import CIMultiDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from yarl import URL

from gateway_svc.http.errors import ApiError, openai_body

_OF_CONNECTIONS = {
    "connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip
"""Headers that hold for one connection (RFC 9110, section 7.6.1)."""
_OF_REQUESTS = {*_OF_CONNECTIONS, "expect"}  # Serve's proxy has said 100-continue already
_OF_ANSWERS = {*_OF_CONNECTIONS, "date", "server", "x-request-id"}
"""Serve's proxy writes the last three itself; every request comes with an id from it."""
_BY_ITSELF = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""What the HTTP client would add to a request that does not have it."""
_HEALTH_TIMEOUT_S = 5.0
_RETRY_S = 1.0


class Forwarder:
    """One HTTP client for all requests, of one event loop."""

    def __init__(self, address: str) -> None:
        """address: the gateway's, `HOST:PORT`."""
        self._url = f"http://{address}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_BY_ITSELF,
        )

    async def answer(self, request: Request) -> Response:
        """Return the gateway's answer, whose body comes as the gateway sends it; 503 while the gateway is away.

        Who cancels the call, or the answer's body, ends the request at the gateway.
        """
        root, path = request.scope.get("root_path", "").encode(), request.scope["raw_path"]
        query = request.scope["query_string"]
        target = path[len(root) :] + (b"?" + query if query else b"")
        has_body = any(name in request.headers for name in ("content-length", "transfer-encoding"))
        try:
            answer = await self._session.request(
                request.method,
                URL(self._url + target.decode("latin-1"), encoded=True),
                headers=CIMultiDict(_passed_on(request.headers.raw, _OF_REQUESTS)),
                data=request.stream() if has_body else None,
                allow_redirects=False,
            )
        except aiohttp.ClientError:
            error = ApiError(503, "the gateway is away", code="unavailable", retry_after_s=_RETRY_S)
            return JSONResponse(openai_body(error), error.status, error.headers)
        passed_on = StreamingResponse(_body(answer), answer.status)
        passed_on.raw_headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in _passed_on(answer.raw_headers, _OF_ANSWERS)
        ]
        return passed_on

    async def refusal(self) -> str | None:
        """Return why no requests are served now; None: they are.

        Raises aiohttp.ClientError, and TimeoutError after 5 s, if the gateway does not answer.
        """
        timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
        async with self._session.get(f"{self._url}/health", timeout=timeout) as answer:
            if answer.status == 200:
                return None
            return f"{answer.status}: {await answer.text()}"

    async def close(self) -> None:
        """End what runs."""
        await self._session.close()


def _passed_on(headers: Iterable[tuple[bytes, bytes]], without: set[str]) -> list[tuple[str, str]]:
    """Headers of a message without those of its connection."""
    fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    named = {
        each.strip().lower() for name, value in fields if name.lower() == "connection" for each in value.split(",")
    }
    return [(name, value) for name, value in fields if name.lower() not in without | named]


async def _body(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body in the pieces in which it comes. One that ends early ends the connection to the client too."""
    with contextlib.closing(answer):
        async for piece, _ in answer.content.iter_chunks():
            if piece:
                yield piece
