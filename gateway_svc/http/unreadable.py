"""Answers to what is no HTTP, or a head too long, in the shape of the APIs: aiohttp's own are plain text."""

from __future__ import annotations

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from gateway_svc.http.errors import ApiError, openai_body

_NAMES = {400: "the request is no HTTP/1.1", 500: "the gateway failed; its log has the reason"}
_MAX_SHOWN = 160


class ApiConnection(web.RequestHandler):
    """aiohttp's handler of one connection."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """As aiohttp's, which logs it, and knows what has been sent already; the path is not known."""
        response = super().handle_error(request, status, exc, message)
        reason = _NAMES.get(status, "the request cannot be read")
        if isinstance(exc, LineTooLong):
            reason = "a line of the request's head is too long"
        elif status < 500 and message:
            reason = f"{reason}: {' '.join(message.split())[:_MAX_SHOWN]}"
        answer = web.json_response(openai_body(ApiError(status, reason)), status=status)
        if response.keep_alive is False:
            answer.force_close()
        return answer
