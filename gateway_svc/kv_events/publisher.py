"""Publishes KV events over ZeroMQ as vLLM does: an XPUB socket, and a ROUTER socket for what a subscriber has missed.

A message of the XPUB socket has three parts: the topic, its number (8 bytes, big-endian, from 0) and the payload. A
request to the ROUTER socket is a number; the answers are the kept messages from it on, then one with the number -1.
The events are those of the scheduler's SubscribeKvEvents. After a lost stream, after a failure, and when a subscriber
comes, the publisher goes on with the present state, which begins with "cleared": what it publishes before a
subscription arrives is lost, and numbers alone may not show that it was restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from cadenza.errors import CadenzaError, PermissionDeniedError, UnauthenticatedError, UnavailableError
from cadenza_common.serving.private_files import make_private
from cadenza_common.serving.slices import run_in_slices
from cadenza_common.settings.extras import install_command
from gateway_svc.config import GatewayConfig
from gateway_svc.scheduler.link import SchedulerLink

_LOG = logging.getLogger(__name__)
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_BINDING = ("ipc://", "inproc://")
_MAX_WAITING = 100_000
"""Messages that wait for a subscriber that does not read; more are lost."""
_MAX_KEPT = 10_000
"""Payloads that are kept for the ROUTER socket."""
_MAX_KEPT_BYTES = 256 << 20
"""Of these together."""
_RETRY_S = 5.0
"""Pause after a failure; after a lost scheduler, until it is back if that is sooner."""
_SUBSCRIBED = 1
"""The first byte of what the socket says of a subscription; 0 ends one."""
_MAX_NEWS = 256
_STATE_S = 1.0
"""The least time between two states for those who come."""
_ANSWERS_AT_ONCE = 32
"""Kept payloads that are sent before the event loop runs other callbacks: some 10 us each."""
_MAX_RECEIVED_BYTES = 4096
"""Of what subscribers send: topics, and numbers."""


class KvPublisherError(Exception):
    """Packages are missing, or an endpoint cannot be used; the message is for the user."""


class KeptPayloads:
    """The last payloads with their numbers, for subscribers that have missed some."""

    def __init__(self, max_payloads: int, max_bytes: int = _MAX_KEPT_BYTES) -> None:
        self.max_payloads = max_payloads
        self._max_bytes = max_bytes
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0

    def add(self, number: int, payload: bytes) -> None:
        """Keep the next one, and drop the oldest that are too many or too large together."""
        self._kept.append((number, payload))
        self._num_bytes += len(payload)
        while len(self._kept) > self.max_payloads or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._kept.popleft()[1])

    def since(self, number: int) -> list[tuple[int, bytes]]:
        """Those with this number or a later one."""
        return [kept for kept in self._kept if kept[0] >= number]


class KvPublisher:
    """Publishes from `start` to `stop`."""

    def __init__(self, link: SchedulerLink, config: GatewayConfig) -> None:
        """config: with an endpoint. Raises KvPublisherError if packages are missing."""
        try:
            import zmq.asyncio

            from gateway_svc.kv_events.payload import kv_payload
        except ModuleNotFoundError as missing:
            raise KvPublisherError(
                f"--kv-events-endpoint: {missing.name} is not installed: {install_command('kv-events')}"
            ) from None
        self._zmq: Any = zmq
        self._context: Any = zmq.asyncio.Context()
        self._payload = kv_payload
        self._link = link
        self._endpoint = str(config.kv_events_endpoint)
        self._replay_endpoint = config.kv_events_replay_endpoint
        self._topic = config.kv_events_topic.encode()
        self._kept = KeptPayloads(_MAX_KEPT)
        self._next_number = 0
        self._refusal = ""
        """Why the scheduler gave no events when it was last asked, as it was logged."""
        self._sockets: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Open the sockets; from then on all events are published. Raises KvPublisherError."""
        publisher = self._socket(self._zmq.XPUB, self._endpoint, _MAX_WAITING)  # a PUB that sees subscriptions
        publisher.setsockopt(self._zmq.XPUB_VERBOSE, 1)
        self._begin("publisher", self._endpoint, lambda: self._publish(publisher))
        if self._replay_endpoint is not None:
            # For a subscriber that asks and does not read, one answer waits: all that is kept, and its end.
            router = self._socket(self._zmq.ROUTER, self._replay_endpoint, self._kept.max_payloads + 1, binds=True)
            self._begin("replay", self._replay_endpoint, lambda: self._replay(router))

    @property
    def endpoints(self) -> list[str]:
        """The endpoints of the sockets; a bound socket's endpoint has its real port."""
        return [socket.getsockopt(self._zmq.LAST_ENDPOINT).rstrip(b"\0").decode() for socket in self._sockets]

    async def stop(self) -> None:
        """Close the sockets; safe at any time."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()

    def _socket(self, kind: int, endpoint: str, hwm: int, *, binds: bool = False) -> Any:
        """A socket that is bound, or connected to an endpoint without * as vLLM's is."""
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(hwm)
        socket.setsockopt(self._zmq.MAXMSGSIZE, _MAX_RECEIVED_BYTES)
        if "::" in endpoint:  # not for *, which would be the addresses of both kinds
            socket.setsockopt(self._zmq.IPV6, 1)
        try:
            if binds or "*" in endpoint or "::" in endpoint or endpoint.startswith(_BINDING):
                socket.bind(endpoint)
                if (path := endpoint.removeprefix("ipc://")) != endpoint:
                    make_private(path)  # events have the token ids of prompts
            else:
                socket.connect(endpoint)
        except self._zmq.ZMQError as error:
            raise KvPublisherError(f"--kv-events-endpoint {endpoint}: {str(error).lower()}") from None
        return socket

    def _begin(self, name: str, endpoint: str, work: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(asyncio.create_task(_until_done(name, endpoint, work), name=f"kv-{name}"))

    async def _publish(self, socket: Any) -> None:
        come = asyncio.Event()
        greeting = asyncio.create_task(self._greet(socket, come), name="kv-greeting")
        try:
            while True:
                come.clear()
                try:
                    await _run_until(self._follow(socket), come)
                except CadenzaError as error:
                    self._log_refusal(error)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_RETRY_S):
                            await self._link.serving_changed()
        finally:
            greeting.cancel()

    async def _follow(self, socket: Any) -> None:
        """Publish the present state, then what changes. Raises CadenzaError when the scheduler's stream ends."""
        async with contextlib.aclosing(self._link.own.kv_events(0)) as batches:
            async for batch in batches:
                self._refusal = ""
                payload = await run_in_slices(self._payload(batch))
                number, self._next_number = self._next_number, self._next_number + 1
                self._kept.add(number, payload)
                # Never waits, so that nobody can cancel it between the number and the message.
                await socket.send_multipart((self._topic, number.to_bytes(_NUMBER_BYTES, "big"), payload))
        raise UnavailableError("the scheduler has ended the stream")

    def _log_refusal(self, error: CadenzaError) -> None:
        """Say why there are no events, once for each reason."""
        if error.message == self._refusal:
            return
        self._refusal = error.message
        hint = ""
        if isinstance(error, UnauthenticatedError | PermissionDeniedError):
            hint = "; --http-token-file must hold the token of a tenant with admin"
        level = logging.ERROR if hint else logging.WARNING
        target = self._link.target
        _LOG.log(level, "KV events: the scheduler at %s gives none, and is asked again: %s%s", target, error, hint)

    async def _greet(self, socket: Any, come: asyncio.Event) -> None:
        """Set the event when subscribers come."""
        while True:
            news = [await socket.recv()]
            while len(news) < _MAX_NEWS and await socket.poll(0):
                news.append(await socket.recv())
            if any(each[:1] == bytes([_SUBSCRIBED]) for each in news):
                come.set()
            await asyncio.sleep(_STATE_S)

    async def _replay(self, socket: Any) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != _NUMBER_BYTES:
                continue  # not ours
            peer, _, asked = frames
            start = int.from_bytes(asked, "big")
            with contextlib.suppress(self._zmq.ZMQError):  # the peer has gone
                await self._answer(socket, peer, start)

    async def _answer(self, socket: Any, peer: bytes, start: int) -> None:
        """Send a peer what is kept from a number on. Sending never waits: what is too much for a peer is dropped."""
        for index, (number, payload) in enumerate(self._kept.since(start)):
            if index % _ANSWERS_AT_ONCE == 0:
                await asyncio.sleep(0)
            frames = peer, b"", self._topic, number.to_bytes(_NUMBER_BYTES, "big"), payload
            await socket.send_multipart(frames, copy=False)
        await socket.send_multipart((peer, b"", b"", _END, b""))


async def _run_until(work: Coroutine[Any, Any, None], end: asyncio.Event) -> None:
    """Do the work, and cancel it once the event is set."""
    working, ending = asyncio.create_task(work), asyncio.create_task(end.wait())
    try:
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
    finally:
        ending.cancel()
        working.cancel()
        (result, _) = await asyncio.gather(working, ending, return_exceptions=True)
    if isinstance(result, Exception):  # CancelledError is none
        raise result


async def _until_done(name: str, endpoint: str, work: Callable[[], Awaitable[None]]) -> None:
    """Do the work; after a failure, log it and begin again."""
    while True:
        try:
            return await work()
        except Exception:
            _LOG.exception("KV events: the %s at %s has failed, and begins again in %g s", name, endpoint, _RETRY_S)
        await asyncio.sleep(_RETRY_S)
