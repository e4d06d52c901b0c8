"""Who may open the page, see its data, and act by it.

Requests for the page's data must come from the page itself, whatever else may call the gateway
(https://www.w3.org/TR/fetch-metadata/); `gateway_svc.http.sites` says why.
"""

from __future__ import annotations

import hmac

from aiohttp import web

from gateway_svc.http.errors import ApiError
from gateway_svc.http.sites import is_own_origin
from gateway_svc.state import State

TOKEN_HEADER = "X-Cadenza-Page-Token"
"""Other sites' pages cannot send it without being asked for by CORS, which the page's paths never allow."""


class Doors:
    """Checks the requests for one gateway's page."""

    def __init__(self, state: State, token: str) -> None:
        self._state = state
        self._token = token.encode()

    def check_host(self, request: web.Request) -> None:
        """Raise the ApiError of a request that asks for another site."""
        if (refusal := self._state.sites.wrong_host(request)) is not None:
            raise refusal

    def check_origin(self, request: web.Request) -> None:
        """Raise the ApiError of a request that a page of another site has made."""
        self.check_host(request)
        site = request.headers.get("Sec-Fetch-Site", "none")
        if site not in ("none", "same-origin") or not is_own_origin(request):
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
