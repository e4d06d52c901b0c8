"""The gateway's connection to the scheduler: one channel, and a session for each key that is in use.

A scheduler without tenants knows one caller, whatever keys its clients send. One with tenants gets each client's own
key, and decides. The gateway needs no right that its clients do not have: each key has a session of its own. With a
token that may name tenants, one session carries all requests (docs/decisions/0046-http-gateway.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict

import grpc
from google.protobuf import wrappers_pb2

from cadenza.credentials import is_loopback
from cadenza.errors import CadenzaError, OptionError, UnauthenticatedError, UnavailableError
from cadenza.tls_client import client_files, client_tls
from cadenza_common.wire.limits import MAX_TOKEN_CHARS
from cadenza_common.wire.transport import SCHEDULER_PORT, aio_channel, format_address, health_reason, parse_address
from gateway_svc.scheduler.caller import SchedulerCaller, close_all
from gateway_svc.scheduler.calls import Calls
from gateway_svc.scheduler.session import GatewaySession
from gateway_svc.scheduler.watching import Watching

_LOG = logging.getLogger(__name__)
_MAX_CALLERS = 1024
"""Keys whose sessions are kept; beyond it the one that was used longest ago and has no request goes."""
_WATCH, _CHECK = "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check"
_SERVING = 1  # grpc.health.v1.HealthCheckResponse.ServingStatus
_RETRY_S = _CHECK_TIMEOUT_S = 0.5
_PATIENCE_S = 10.0
"""A restarted scheduler or executor is back by then: until then requests wait for it."""


class SchedulerLink:
    """Connects the gateway to a scheduler at `HOST:PORT`."""

    def __init__(
        self, target: str, *, reconnect_timeout_s: float, insecure: bool, own_token: str | None = None
    ) -> None:
        """own_token: for what no client asks for: the gateway's view of metrics and adapters.

        Raises OptionError for TLS that cannot be used, and for keys that others could read on the way.
        """
        host, port = parse_address(target, default_port=SCHEDULER_PORT)
        self.target = format_address(host, port)
        self._tls = client_tls(None)
        files = client_files(self._tls)
        if self._tls is None and not insecure and not is_loopback(host):
            raise OptionError(
                f"option target: API keys are not sent to {host} without TLS, where others may read them: use TLS "
                "(CADENZA_TLS_CA), or say that the network is safe (--insecure)"
            )
        self._timeout_s = reconnect_timeout_s
        self._channel = aio_channel(self.target, files)
        self._own_token = own_token
        self._callers: OrderedDict[str | None, SchedulerCaller] = OrderedDict()
        self._own: SchedulerCaller | None = None
        self._has_tenants: bool | None = None
        """As far as is known."""
        self._is_sure = False
        self._is_shared = False
        """Whether the gateway's own session carries the requests of all keys."""
        self._retired: list[SchedulerCaller] = []
        """Those of before that changed."""
        self._calls = Calls(self.target, self._tls, reconnect_timeout_s, lambda: not self.is_away)
        self._watching: asyncio.Task[None] | None = None
        self.is_serving = False
        """Whether the scheduler serves, by its own health."""
        self._unserved_since = time.monotonic()
        self._changed = asyncio.Event()

    def start(self) -> None:
        """Watch the scheduler's health from now on."""
        self._watching = asyncio.create_task(self._watch(), name="scheduler-health")

    async def close(self) -> None:
        """End all sessions, which aborts what runs, and the connection."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await close_all(self._all_callers())
        await self._channel.close()

    def end_requests(self) -> None:
        """Abort what runs, with an error for whoever waits for it."""
        for each in self._all_callers():
            each.end_all()

    @property
    def unserved_s(self) -> float:
        """For how long the scheduler has not served; 0 while it does."""
        return 0.0 if self.is_serving else time.monotonic() - self._unserved_since

    async def serving_changed(self) -> None:
        """Wait until `is_serving` changes."""
        self._changed.clear()
        await self._changed.wait()

    @property
    def is_away(self) -> bool:
        """Whether it has not served for longer than a restart takes."""
        return self.unserved_s > min(_PATIENCE_S, self._timeout_s)

    async def why_unserved(self) -> str:
        """Why it does not serve, in its own words if it answers."""
        check = self._channel.unary_unary(
            _CHECK,
            request_serializer=wrappers_pb2.StringValue.SerializeToString,
            response_deserializer=wrappers_pb2.Int32Value.FromString,
        )
        try:
            call = check(wrappers_pb2.StringValue(), timeout=_CHECK_TIMEOUT_S)
            await call
            reason = health_reason(await call.trailing_metadata())
        except grpc.aio.AioRpcError:
            reason = "it is away"
        return f"the scheduler at {self.target} does not serve" + (f": {reason}" if reason else "")

    @property
    def num_requests(self) -> int:
        """Prompts that run."""
        return sum(each.num_own_requests for each in self._all_callers())

    @property
    def own(self) -> SchedulerCaller:
        """The gateway itself."""
        if self._own is None:
            self._own = self._make(self._own_token)
        return self._own

    async def caller(self, key: str | None) -> SchedulerCaller:
        """Who a request with this key is from.

        Raises UnauthenticatedError for a key that the scheduler does not know, UnavailableError without a scheduler.
        """
        if not self._is_sure:
            await self._find_tenants()
        if not self._has_tenants:
            key = None
        elif key is None or not _is_token(key):
            raise UnauthenticatedError("the API key is missing or unknown")
        caller = self._callers.get(key)
        if caller is None:
            caller = self._make(key, self.own.session if key is not None and self._is_shared else None)
            if self._has_tenants:
                await caller.check_model()  # no session for keys that nobody has
            if (known := self._callers.get(key)) is not None:
                return known  # of another request, made meanwhile; this one has opened nothing
            self._keep(key, caller)
        self._callers.move_to_end(key)
        return caller

    def watching(self) -> Watching:
        """The gateway's own look at the engine."""
        return Watching(self._channel, self.target, self._tls, self._own_token)

    async def has_tenants(self) -> bool:
        """Whether callers need a key, as far as is known; raises UnavailableError while nobody can say."""
        if not self._is_sure:
            await self._find_tenants()
        return bool(self._has_tenants)

    async def needs_key(self) -> bool:
        """Whether callers need a key, asked for now; raises UnavailableError while nobody can say."""
        await self._find_tenants()
        return bool(self._has_tenants)

    # ---------------------------------------------------------------------------------------------------------------

    async def _find_tenants(self) -> None:
        """Find out whether callers need a key: a call without one says so."""
        anonymous = self._callers.get(None) or self._make(None)
        try:
            await anonymous.check_model(waits=False)
        except UnauthenticatedError:
            if not self._has_tenants:
                _LOG.info(
                    "requests need a key, a tenant's token; /health, /version, /openapi.json and the gateway's own "
                    "/metrics need none"
                )
            self._has_tenants = self._is_sure = True
            if self._own_token is not None:
                await self._find_right()
            return
        except UnavailableError:
            if self._has_tenants is None:
                raise
            return  # it is away: requests wait for it, as it was
        self._has_tenants, self._is_sure = False, True
        self._callers.setdefault(None, anonymous)

    async def _find_right(self) -> None:
        """Find out whether one session may carry the requests of all keys; those that run go on where they are."""
        try:
            may = await self.own.may_name_tenants()
        except UnavailableError:
            return  # as it was
        except CadenzaError as error:
            _LOG.warning("the scheduler refuses the token of --http-token-file: %s", error)
            may = False
        if may != self._is_shared:
            _LOG.info("%s", "one session carries all requests" if may else "each key has a session of its own")
            self._is_shared = may
            self._retired += self._callers.values()
            self._callers.clear()

    def _all_callers(self) -> list[SchedulerCaller]:
        return [*self._callers.values(), *self._retired, *([self._own] if self._own else [])]

    def _make(self, key: str | None, shared: GatewaySession | None = None) -> SchedulerCaller:
        return SchedulerCaller(
            self._channel,
            self.target,
            key,
            timeout_s=self._timeout_s,
            calls=self._calls,
            on_response=self._on_response,
            on_loss=self._on_loss,
            shared=shared,
        )

    def _keep(self, key: str | None, caller: SchedulerCaller) -> None:
        self._callers[key] = caller
        if len(self._callers) > _MAX_CALLERS:
            idle = (name for name, each in self._callers.items() if not each.num_own_requests and each is not caller)
            if (name := next(idle, key)) != key:
                task = asyncio.create_task(self._callers.pop(name).close(), name="gateway-session-end")
                task.add_done_callback(lambda _: None)

    def _on_response(self) -> None:
        self._calls.was_reached = True

    def _on_loss(self) -> None:
        """A session has ended: the next scheduler may have tenants, or none any more."""
        self._is_sure = False

    async def _watch(self) -> None:
        """Follow grpc.health.v1, whose messages equal these wrappers on the wire (cadenza.healthcheck)."""
        watch = self._channel.unary_stream(
            _WATCH,
            request_serializer=wrappers_pb2.StringValue.SerializeToString,
            response_deserializer=wrappers_pb2.Int32Value.FromString,
        )
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for state in watch(wrappers_pb2.StringValue()):
                    was_serving = self.is_serving
                    self._set_serving(state.value == _SERVING)
                    if was_serving and not self.is_serving:
                        _LOG.warning("%s", await self.why_unserved())
            if self.is_serving:
                _LOG.warning("the scheduler at %s does not serve: it is away", self.target)
            self._set_serving(False)
            await asyncio.sleep(_RETRY_S)

    def _set_serving(self, serving: bool) -> None:
        if serving != self.is_serving:
            self.is_serving, self._unserved_since = serving, time.monotonic()
            self._changed.set()
            if serving:
                _LOG.info("the scheduler at %s serves", self.target)


def _is_token(key: str) -> bool:
    return 0 < len(key) <= MAX_TOKEN_CHARS and key.isascii() and key.isprintable() and " " not in key
