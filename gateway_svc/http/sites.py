"""Check a request's Host and Origin: the name that it asks for, and the site of the page that makes it.

A page of another site can make a browser send requests here, and by DNS rebinding it can even read the answers: its
name is made to resolve to 127.0.0.1, and to the browser this gateway is then a server of that site. So the name by
which a request asks must be one of ours, and a page that makes one must be of a site that may
(https://fetch.spec.whatwg.org/#origin-header). Programs that are no browsers send what they like; this is not for them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from aiohttp import web

from cadenza.credentials import is_loopback
from gateway_svc.config import GatewayConfig
from gateway_svc.http.errors import ApiError

_RESERVED = (".localhost", ".internal")
"""Nobody can have such a name in the public DNS (RFC 6761, ICANN's resolution of 2024-07-29): containers call the
machine host.docker.internal."""
_MAX_AGE_S = 600
_ANY = "*"


class Cors:
    """Which origins' pages may call: cross-origin calls of browsers, off without an option.

    https://fetch.spec.whatwg.org/#http-cors-protocol
    """

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


class Sites:
    """The names of one gateway, and the sites whose pages may call it."""

    def __init__(self, config: GatewayConfig, cors: Cors) -> None:
        own = config.listeners["http"][0] if "http" in config.listeners else "localhost"
        self._names = {name.lower().rstrip(".") for name in (*config.page_host, own, "localhost")}
        self._cors = cors
        self.is_local = is_loopback(own)
        """Whether programs of this machine alone reach the gateway."""

    def refusal(self, request: web.Request) -> ApiError | None:
        """The error of a request that a page of another site can have made; None: there is none."""
        return self.wrong_host(request) or self._wrong_origin(request)

    def wrong_host(self, request: web.Request) -> ApiError | None:
        """The error of a request that asks for another site; None: it asks for this gateway."""
        host = request.headers.get("Host")
        if host is None:  # HTTP/1.0: no browser
            return None
        name = _host_name(host)
        if name in self._names or name.endswith(_RESERVED) or _is_address(name):
            return None
        message = "the gateway is not served by this name: use its address, or --page-host"
        return ApiError(403, message, code="wrong_host")

    def _wrong_origin(self, request: web.Request) -> ApiError | None:
        origin = request.headers.get("Origin")
        if origin is None or self._cors.allows(origin) or is_own_origin(request):
            return None
        name = _host_name(origin.partition("://")[2]) if origin.startswith(("http://", "https://")) else ""
        if name in self._names or is_loopback(name):  # pages of this machine, and those that a proxy serves with us
            return None
        message = "pages of this origin may not call (--http-cors-origin)"
        return ApiError(403, message, code="wrong_origin")


def is_own_origin(request: web.Request) -> bool:
    """Whether no page has made a request, or one of the host that it asks for."""
    origin = request.headers.get("Origin")
    return origin is None or origin.lower().partition("://")[2] == request.headers.get("Host", "").lower()


def _host_name(host: str) -> str:
    """The name or address of a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")


def _is_address(name: str) -> bool:
    """Whether it is an IP address, which no other site's name can be."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
