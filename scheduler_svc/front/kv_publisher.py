"""Publishes KV events over ZeroMQ as vLLM does: a PUB socket, and a ROUTER socket for what a subscriber has missed.

A message of the PUB socket has three parts: the topic, its number (8 bytes, big-endian, from 0) and the payload. A
request to the ROUTER socket is a number; the answers are the kept messages from it on, then one with the number -1.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from cadenza.settings.extras import install_command
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.engine.kv_events.hub import KvEvents

_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_BINDING = ("ipc://", "inproc://")


class KvPublisherError(Exception):
    """Packages are missing, or an endpoint cannot be used; the message is for the user."""


class KvPublisher:
    """Publishes from `start` to `stop`."""

    def __init__(
        self, events: KvEvents, adapter_names: Callable[[], Mapping[bytes, str]], config: SchedulerConfig
    ) -> None:
        """adapter_names: by the hash of their content. Raises KvPublisherError if packages are missing."""
        try:
            import zmq.asyncio

            from scheduler_svc.convert.kv_payload import kv_payload
        except ModuleNotFoundError as missing:
            raise KvPublisherError(
                f"--kv-events-endpoint: {missing.name} is not installed: {install_command('kv-events')}"
            ) from None
        self._zmq: Any = zmq
        self._context: Any = zmq.asyncio.Context()
        self._payload = kv_payload
        self._events = events
        self._adapter_names = adapter_names
        self._endpoint = str(config.kv_events_endpoint)
        self._replay_endpoint = config.kv_events_replay_endpoint
        self._topic = config.kv_events_topic.encode()
        self._hwm = config.kv_events_hwm
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.kv_events_buffer_steps)
        self._next_number = 0
        self._sockets: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Open the sockets; from then on all events are published. Raises KvPublisherError."""
        publisher = self._socket(self._zmq.PUB, self._endpoint)
        self._tasks.append(asyncio.create_task(self._publish(publisher), name="kv-publisher"))
        if self._replay_endpoint is not None:
            router = self._socket(self._zmq.ROUTER, self._replay_endpoint, binds=True)
            self._tasks.append(asyncio.create_task(self._replay(router), name="kv-replay"))

    @property
    def endpoints(self) -> list[str]:
        """Where the sockets are, those that were bound with the port that they have."""
        return [socket.getsockopt(self._zmq.LAST_ENDPOINT).rstrip(b"\0").decode() for socket in self._sockets]

    async def stop(self) -> None:
        """Close the sockets; safe at any time."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()

    def _socket(self, kind: int, endpoint: str, *, binds: bool = False) -> Any:
        """A socket that is bound, or connected to an endpoint without * as vLLM's is."""
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(self._hwm)
        if "::" in endpoint:  # not for *, which would be the addresses of both kinds
            socket.setsockopt(self._zmq.IPV6, 1)
        try:
            if binds or "*" in endpoint or "::" in endpoint or endpoint.startswith(_BINDING):
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except self._zmq.ZMQError as error:
            raise KvPublisherError(f"--kv-events-endpoint {endpoint}: {str(error).lower()}") from None
        return socket

    async def _publish(self, socket: Any) -> None:
        subscription = self._events.subscribe()
        try:
            async for batch in subscription:
                payload = self._payload(batch, self._adapter_names())
                number, self._next_number = self._next_number, self._next_number + 1
                self._kept.append((number, payload))
                await socket.send_multipart((self._topic, number.to_bytes(_NUMBER_BYTES, "big"), payload))
        finally:
            subscription.close()

    async def _replay(self, socket: Any) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != _NUMBER_BYTES:
                continue  # not ours
            peer, _, asked = frames
            start = int.from_bytes(asked, "big")
            with contextlib.suppress(self._zmq.ZMQError):  # the peer has gone
                for number, payload in [kept for kept in self._kept if kept[0] >= start]:
                    await socket.send_multipart(
                        (peer, b"", self._topic, number.to_bytes(_NUMBER_BYTES, "big"), payload)
                    )
                await socket.send_multipart((peer, b"", b"", _END, b""))
