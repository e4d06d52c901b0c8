"""Cross-origin calls of browsers (https://fetch.spec.whatwg.org/#http-cors-protocol): off without an option."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from gateway_svc.http.errors import ApiError

_MAX_AGE_S = 600
_ANY = "*"


class Cors:
    """Which origins' pages may call."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def allows(self, origin: str) -> bool:
        """Whether pages of an origin may call."""
        return bool({origin, _ANY} & self._origins)

    def headers(self, request: web.Request) -> dict[str, str]:
        """What an answer says of cross-origin calls; nothing for an origin that may not call."""
        origin = request.headers.get("Origin")
        if origin is None or not self.allows(origin):
            return {}
        allowed = _ANY if _ANY in self._origins else origin
        return {
            "Access-Control-Allow-Origin": allowed,
            "Access-Control-Expose-Headers": "X-Request-ID, request-id, Retry-After",
            "Vary": "Origin",
        }

    def preflight(self, request: web.Request) -> web.Response:
        """The answer to a browser's question whether its page may call."""
        headers = self.headers(request)
        if not headers:
            raise ApiError(403, "pages of this origin may not call (--http-cors-origin)")
        asked = request.headers.get("Access-Control-Request-Headers", "")
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": "GET, HEAD, POST, OPTIONS",
                "Access-Control-Allow-Headers": asked if asked.isprintable() else "",
                "Access-Control-Max-Age": str(_MAX_AGE_S),
            },
        )
