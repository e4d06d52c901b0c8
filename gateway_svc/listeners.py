"""Where a gateway serves: HTTP, each gRPC dialect at an address of its own, and KV events."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import grpc

from cadenza_common.wire.transport import SCHEDULER_PORT, parse_address
from gateway_svc.http_listener import HttpListener
from gateway_svc.kv_events.publisher import KvPublisher
from gateway_svc.rpc.listener import RpcListener, rpc_credentials
from gateway_svc.several.door import DoorState
from gateway_svc.several.rpc import ModelDoor
from gateway_svc.several.wire import DoorPlace
from gateway_svc.state import State


def _kserve(state: State) -> RpcListener:
    from gateway_svc.dialects.inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server as add
    from gateway_svc.kserve.servicer import SERVICE, InferenceServicer

    return RpcListener(SERVICE, partial(add, InferenceServicer(state)))


def _vllm(state: State) -> RpcListener:
    from gateway_svc.dialects.vllm_engine_pb2_grpc import add_VllmEngineServicer_to_server as add
    from gateway_svc.vllm.servicer import SERVICE, EngineServicer

    return RpcListener(SERVICE, partial(add, EngineServicer(state)))


_DIALECTS: Mapping[str, Callable[[State], RpcListener]] = {"kserve": _kserve, "vllm_grpc": _vllm}


class Listeners:
    """Serve from `start` on, with the connection to the scheduler, until `close`."""

    def __init__(self, state: State, door: DoorPlace | None = None) -> None:
        """door: there are several models. Raises OptionError for files of TLS."""
        self._state, self._door_place = state, door
        self._door: ModelDoor | None = None
        self._places = state.config.listeners
        self._http = HttpListener(state) if "http" in self._places else None
        self._credentials: grpc.ServerCredentials | None = rpc_credentials(state.config)
        self._rpc: dict[str, RpcListener] = {}
        self._publisher: KvPublisher | None = None
        self._following: asyncio.Task[None] | None = None
        self.addresses: dict[str, str] = {}
        """By option, HTTP first and KV events last, whose address is their endpoint without tcp://."""

    @property
    def urls(self) -> list[str]:
        """Where each listens, for the log."""
        schemes = ("https", "grpcs") if self._state.config.http_tls_cert else ("http", "grpc")
        kv_events = [] if self._publisher is None else [f"{each} (kv-events)" for each in self._publisher.endpoints]
        return [
            f"{schemes[0]}://{address}" if name == "http" else f"{schemes[1]}://{address} ({name.replace('_', '-')})"
            for name, address in self.addresses.items()
            if name in self._places or name == "grpc"
        ] + kv_events

    @property
    def page_url(self) -> str:
        """Where a browser on this machine opens the page: an address of all interfaces is none to open."""
        return re.sub(r"//(0\.0\.0\.0|\[::\]):", "//localhost:", self.urls[0])

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of HTTP, as they were added."""
        return () if self._http is None else self._http.paths

    async def start(self) -> dict[str, str]:
        """Listen; returns the addresses.

        Raises OSError and KvPublisherError, after which `close` is still to be called.
        """
        self._state.link.start()
        config = self._state.config
        for name, place in self._places.items():
            if self._http is not None and name == "http":
                self.addresses[name] = await self._http.start(place)
                continue
            self._rpc[name] = _DIALECTS[name](self._state)
            self.addresses[name] = await self._rpc[name].start(
                place, self._credentials, config.max_connections_per_peer
            )
        if config.kv_events_endpoint is not None:
            self._publisher = KvPublisher(self._state.link, config)
            self._publisher.start()
            self.addresses["kv_events_endpoint"] = self._publisher.endpoints[0].removeprefix("tcp://")
        if self._door_place is not None:
            self._door = ModelDoor(cast(DoorState, self._state))
            place = parse_address(self._door_place.address, default_port=SCHEDULER_PORT)
            self.addresses["grpc"] = await self._door.start(place, self._credentials)
        self._following = asyncio.create_task(self._follow(), name="gateway-health")
        return self.addresses

    async def refuse(self) -> None:
        """Take no new connections, and say that nothing is served; what runs goes on."""
        if self._http is not None:
            await self._http.refuse()
        for each in self._rpc.values():
            each.health.stop()

    async def close(self) -> None:
        """End what runs, each with an error that its client still gets, and the connection to the scheduler."""
        self._state.link.end_requests()
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        if self._publisher is not None:
            await self._publisher.stop()
        await asyncio.gather(*(each.stop() for each in self._rpc.values()))
        if self._door is not None:
            await self._door.stop()
        if self._http is not None:
            await self._http.close()
        await self._state.long_bodies.close()
        await self._state.link.close()

    async def _follow(self) -> None:
        """Show the scheduler's health as that of the dialects."""
        while True:
            serving = self._state.link.is_serving
            for each in self._rpc.values():
                each.health.set(serving)
            await self._state.link.serving_changed()
