"""Who may open the page, see its data, and act by it.

A page of another site can make a browser send requests here, and by DNS rebinding it can even read the answers: its
name is made to resolve to 127.0.0.1, and to the browser this gateway is then a server of that site. So the name by
which a request asks for the page must be one of ours, and a request of a page must come from our own
(https://fetch.spec.whatwg.org/#origin-header, https://www.w3.org/TR/fetch-metadata/).
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence

from aiohttp import web

from cadenza.gateway.http.errors import ApiError
from cadenza.gateway.state import State

TOKEN_HEADER = "X-Cadenza-Page-Token"
"""Other sites' pages cannot send it without being asked for by CORS, which the page's paths never allow."""


class Doors:
    """Checks the requests for one gateway's page."""

    def __init__(self, state: State, token: str, hosts: Sequence[str]) -> None:
        """hosts: names by which the page may be asked for, besides addresses and that of --http."""
        self._state = state
        self._token = token.encode()
        own = state.config.listeners["http"][0]
        self._hosts = {name.lower().rstrip(".") for name in (*hosts, own, "localhost")}

    def check_host(self, request: web.Request) -> None:
        """Raise the ApiError of a request that asks for another site."""
        name = _host_name(request.headers.get("Host", ""))
        if not (name in self._hosts or _is_address(name)):
            message = "the page is not served by this name: use its address, or --page-host"
            raise ApiError(403, message, code="wrong_host")

    def check_origin(self, request: web.Request) -> None:
        """Raise the ApiError of a request that a page of another site has made."""
        self.check_host(request)
        site = request.headers.get("Sec-Fetch-Site", "none")
        origin = request.headers.get("Origin")
        host = request.headers.get("Host", "").lower()
        if site not in ("none", "same-origin") or (origin is not None and origin.lower().partition("://")[2] != host):
            raise ApiError(403, "the page's data are for the page itself", code="wrong_origin")

    def has_right(self, request: web.Request) -> bool:
        """Whether a request shows the page's token, or an admin's key of the gateway."""
        given = request.headers.get(TOKEN_HEADER, "")
        if hmac.compare_digest(given.encode("utf-8", "replace"), self._token):
            return True
        admin_keys = self._state.admin_keys
        return bool(given) and admin_keys is not None and admin_keys.holds(given)

    def check_right(self, request: web.Request) -> None:
        """Raise the ApiError of a request that may not act."""
        self.check_origin(request)
        if not self.has_right(request):
            raise ApiError(401, "the page's token is missing or wrong", code="page_token")

    async def check_view(self, request: web.Request) -> bool:
        """Raise the ApiError of a request that may not see all requests; returns whether it showed a right.

        Where clients need keys, only who has a right sees what others do. Raises UnavailableError while nobody can say.
        """
        self.check_origin(request)
        if self.has_right(request):
            return True
        if self._state.keys is not None or await self._state.link.needs_key():
            raise ApiError(401, "the page's token is missing or wrong", code="page_token")
        return False


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
