"""A channel whose TLS files may be replaced: each call uses a connection made with the files as they are now.

grpcio's credentials of a channel are fixed. So the calls after a change get a channel of their own, and the earlier
one is closed when its last call has ended: no stream is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from cadenza_common.wire.tls.connection import ChannelFiles


class _ChannelGeneration:
    """The channel of one state of the files, and the number of its open calls."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.methods: dict[_Method, Any] = {}
        self.num_open = 0
        self.is_old = False
        self.closing: asyncio.Task[None] | None = None

    def call(self, method: _Method, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Begin a call."""
        if method not in self.methods:
            self.methods[method] = getattr(self.channel, method.kind)(*method.arguments, **method.options)
        call = self.methods[method](*arguments, **options)
        self.num_open += 1
        call.add_done_callback(self._ended)
        return call

    def retire(self) -> None:
        """Close the channel once its calls have ended."""
        self.is_old = True
        self._close_if_unused()

    def _ended(self, call: Any) -> None:
        self.num_open -= 1
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self.is_old and self.num_open == 0 and self.closing is None:
            self.closing = asyncio.ensure_future(self.channel.close())


class _Method:
    """Calls one method of a service, on the newest channel."""

    def __init__(self, owner: TlsChannel, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.kind = kind
        self.arguments = arguments
        self.options = options
        self._owner = owner

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Begin a call; the arguments are grpc.aio's."""
        return self._owner.newest().call(self, arguments, options)


class TlsChannel(grpc.aio.Channel):
    """A grpc.aio.Channel over TLS."""

    def __init__(self, files: ChannelFiles, connect: Callable[[grpc.ChannelCredentials], grpc.aio.Channel]) -> None:
        self._files = files
        self._connect = connect
        self._version = files.version
        self._generations = [_ChannelGeneration(connect(files.credentials()))]

    def newest(self) -> _ChannelGeneration:
        """The channel for a new call; made anew if the files have changed."""
        if self._files.look() != self._version:
            self._version = self._files.version
            self._generations = [each for each in self._generations if each.closing is None]
            self._generations[-1].retire()
            self._generations.append(_ChannelGeneration(self._connect(self._files.credentials())))
        return self._generations[-1]

    async def __aenter__(self) -> TlsChannel:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Close all connections."""
        await asyncio.gather(*(each.channel.close(grace) for each in self._generations))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """The state of the newest connection."""
        return self.newest().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """As grpc.aio.Channel, for the newest connection."""
        await self.newest().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """As grpc.aio.Channel, for the newest connection."""
        await self.newest().channel.channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """As grpc.aio.Channel."""
        return _Method(self, "unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """As grpc.aio.Channel."""
        return _Method(self, "unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """As grpc.aio.Channel."""
        return _Method(self, "stream_unary", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """As grpc.aio.Channel."""
        return _Method(self, "stream_stream", arguments, options)


def tls_channel(target: str, files: ChannelFiles, options: Sequence[tuple[str, Any]]) -> TlsChannel:
    """A channel to `HOST:PORT`."""
    every = [*options, *files.options()]
    return TlsChannel(files, lambda credentials: grpc.aio.secure_channel(target, credentials, options=every))
