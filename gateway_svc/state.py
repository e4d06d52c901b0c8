"""What all handlers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from aiohttp import web

from gateway_svc.config import GatewayConfig
from gateway_svc.http.bodies.apart import LongBodies
from gateway_svc.http.errors import ApiError
from gateway_svc.http.keys import KeyFile
from gateway_svc.http.reading import PAYER, api_key, read_body
from gateway_svc.http.sites import Cors, Sites
from gateway_svc.metrics import Counts
from gateway_svc.models import Names
from gateway_svc.page_starter import PageRights
from gateway_svc.parsing.formats import KnownFormats
from gateway_svc.scheduler.caller import SchedulerCaller
from gateway_svc.scheduler.link import SchedulerLink

_RETRY_S = 1.0


class NamesModel(Protocol):
    """What was asked for."""

    @property
    def model(self) -> str | None:
        """The model that a request names."""


A = TypeVar("A", bound=NamesModel)


@dataclass(slots=True)
class State:
    """Of one gateway."""

    config: GatewayConfig
    link: SchedulerLink
    keys: KeyFile | None
    """Keys of clients, without tenants."""
    admin_keys: KeyFile | None
    names: Names
    formats: KnownFormats
    cors: Cors
    sites: Sites
    page_rights: PageRights
    long_bodies: LongBodies
    counts: Counts = field(default_factory=Counts)
    is_stopping: bool = False

    async def check_site(self, request: web.Request) -> None:
        """Raise the ApiError of a request that a page of another site can have made, where nothing else is asked for.

        Loopback without keys trusts every program of this machine, and a browser is one. Raises UnavailableError while
        nobody can say whether keys are asked for.
        """
        refusal = self.sites.refusal(request)
        if refusal is not None and self.sites.is_local and self.keys is None and not await self.link.has_tenants():
            raise refusal

    async def asked(
        self, request: web.Request, read: Callable[[Mapping[str, Any]], A], *, generates: bool = True
    ) -> tuple[A, State, SchedulerCaller]:
        """What a request asks for, what serves its model, and who it is from; raises ApiError and CadenzaError."""
        caller = await (self.generating(request) if generates else self.caller(request))
        return await read_body(request, read), self, caller

    async def caller(self, request: web.Request) -> SchedulerCaller:
        """Who a request is from; raises ApiError and CadenzaError."""
        caller = await self.caller_with(api_key(request))
        request[PAYER] = await self.payer(api_key(request), request.remote)
        return caller

    async def caller_with(self, key: str | None) -> SchedulerCaller:
        """Who has a key; raises ApiError and CadenzaError."""
        if self.keys is not None:
            self.keys.check(key)
        return await self.link.caller(key)

    async def payer(self, key: str | None, address: str | None) -> str:
        """Whose share a body takes: its key's if that is known to be one, else its address's."""
        is_known = self.keys is not None or await self.link.has_tenants()
        return f"key {key}" if is_known else address or ""

    async def watcher_with(self, key: str | None) -> SchedulerCaller:
        """Who may see, and empty, the caches that all share; raises as `caller_with`.

        Where clients need keys of the gateway's, a key of its admins; of tenants the scheduler knows the admins.
        """
        if self.keys is None:
            return await self.caller_with(key)
        if self.admin_keys is not None and self.admin_keys.holds(key):
            return self.link.own
        self.keys.check(key)
        raise ApiError(403, "what the caches hold is for a key of --http-admin-key-file")

    async def generating(self, request: web.Request) -> SchedulerCaller:
        """The same for a request that generates: raises ApiError while none can be served."""
        caller = await self.generating_with(api_key(request))
        request[PAYER] = await self.payer(api_key(request), request.remote)
        return caller

    async def generating_with(self, key: str | None) -> SchedulerCaller:
        """The same for a key."""
        self.check_room()
        if self.link.is_away:
            message = await self.link.why_unserved()
            raise ApiError(503, message, code="unavailable", retry_after_s=_RETRY_S)
        return await self.caller_with(key)

    def check_room(self) -> None:
        """Raise ApiError while no request is taken."""
        if self.is_stopping:
            raise ApiError(503, "the gateway is stopping", code="unavailable", retry_after_s=_RETRY_S)
        if self.counts.num_running > self.config.http_max_requests:
            message = f"{self.config.http_max_requests} requests run, which is the limit (--http-max-requests)"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=_RETRY_S)


STATE = web.AppKey("state", State)
