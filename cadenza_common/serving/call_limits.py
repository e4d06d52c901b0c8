"""What one peer may take of a service before its requests are known: calls, metadata, unfinished messages.

gRPC's own limits are among the options in `cadenza_common.wire.transport`. These fill the gaps that measurements have
shown (docs/security.md): a peer that never confirms the server's settings may send 16 MB of metadata with each call;
half a message is kept for as long as its call stays open.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc

from cadenza_common.metrics.listener_counts import ListenerCounts, RefusalReason
from cadenza_common.wire.transport import MAX_METADATA_BYTES

MESSAGE_TIMEOUT_S = 30.0
"""How long the only message of a call may take to arrive."""
MAX_UNFINISHED = 64
"""Calls that may wait for the rest of their message for over a second; beyond it the oldest ones end."""
MAX_STREAMS_PER_PEER = 1024
"""Calls with a stream of messages (sessions, reflection) of one address: each may hold half a message, of 2 MiB."""
MAX_CALLS_PER_PEER = 16_384
"""Calls of one address with one message each: an idle one takes some 24 KB."""
_GRACE_S = 1.0
_ENTRY_BYTES = 32
_Handler = Any  # grpc.RpcMethodHandler, which has no useful type
_Context = grpc.aio.ServicerContext[Any, Any]


class CallLimits(grpc.aio.ServerInterceptor):
    """Begins no handler before the call's message is there.

    It keeps what the next interceptor returns for a method: one that decides by the call must come before it.
    """

    def __init__(
        self,
        *,
        message_timeout_s: float = MESSAGE_TIMEOUT_S,
        max_streams_per_peer: int = MAX_STREAMS_PER_PEER,
        max_calls_per_peer: int = MAX_CALLS_PER_PEER,
        counts: ListenerCounts | None = None,
    ) -> None:
        """counts: gets the calls that are refused."""
        counts = counts or ListenerCounts()
        self._counts = counts
        self._unfinished = UnfinishedMessages(message_timeout_s, counts=counts)
        self._streams = _PeerCounts(max_streams_per_peer, "streams of messages", RefusalReason.STREAMS_OF_PEER, counts)
        self._calls = _PeerCounts(max_calls_per_peer, "calls", RefusalReason.CALLS_OF_PEER, counts)
        self._limited: dict[str, _Handler] = {}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]], details: grpc.HandlerCallDetails
    ) -> _Handler:
        """The method's handler within the limits, cached."""
        if metadata_bytes(details.invocation_metadata) > MAX_METADATA_BYTES:
            return grpc.stream_stream_rpc_method_handler(functools.partial(_refuse_metadata, self._counts))
        handler = self._limited.get(details.method)
        if handler is None:
            handler = await continuation(details)
            if handler is None:
                return handler
            limit = self._limit_streams if handler.request_streaming else self._limit_message
            handler = self._limited[details.method] = limit(handler)
        return handler

    def _limit_message(self, handler: _Handler) -> _Handler:
        """The handler of a call with one message, as one that reads a stream: only so can the wait for it end."""
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        if inspect.isasyncgenfunction(behaviour):

            async def generate(messages: AsyncIterator[Any], context: _Context) -> AsyncIterator[Any]:
                address = await self._calls.take(context)
                try:
                    async for response in behaviour(await self._unfinished.first(messages, context), context):
                        yield response
                finally:
                    self._calls.free(address)

            run: Any = generate
        else:

            async def call(messages: AsyncIterator[Any], context: _Context) -> Any:
                address = await self._calls.take(context)
                try:
                    return await behaviour(await self._unfinished.first(messages, context), context)
                finally:
                    self._calls.free(address)

            run = call
        make: Any = grpc.stream_unary_rpc_method_handler
        if handler.response_streaming:
            make = grpc.stream_stream_rpc_method_handler
        return make(run, handler.request_deserializer, handler.response_serializer)

    def _limit_streams(self, handler: _Handler) -> _Handler:
        """The handler of a call with a stream of messages, for so many calls of one address at a time."""
        kind = "stream_stream" if handler.response_streaming else "stream_unary"
        behaviour = getattr(handler, kind)
        if inspect.isasyncgenfunction(behaviour):

            async def generate(messages: AsyncIterator[Any], context: _Context) -> AsyncIterator[Any]:
                address = await self._streams.take(context)
                try:
                    async for response in behaviour(messages, context):
                        yield response
                finally:
                    self._streams.free(address)

            return handler._replace(**{kind: generate})

        async def call(messages: AsyncIterator[Any], context: _Context) -> Any:
            address = await self._streams.take(context)
            try:
                return await behaviour(messages, context)
            finally:
                self._streams.free(address)

        return handler._replace(**{kind: call})


class _PeerCounts:
    """Counts open calls by the peer's address, for which there is a limit."""

    def __init__(self, limit: int, what: str, refusal: RefusalReason, counts: ListenerCounts) -> None:
        self._limit = limit
        self._what = what
        self._refusal = refusal
        self._counts = counts
        self._open: Counter[str] = Counter()

    async def take(self, context: _Context) -> str:
        """Count a call, and return its peer's address; ends the call if there are too many."""
        address = context.peer().rpartition(":")[0]
        if self._open[address] >= self._limit:
            self._counts.refuse(self._refusal, context)
            message = f"{address} has {self._limit} {self._what}, which is the limit"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        self._open[address] += 1
        return address

    def free(self, address: str) -> None:
        """Take an ended call off the count of its peer."""
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


class UnfinishedMessages:
    """The calls whose only message has not arrived. One timer looks at all of them: one for each costs more."""

    def __init__(
        self, timeout_s: float, max_calls: int = MAX_UNFINISHED, *, counts: ListenerCounts | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._max_calls = max_calls
        self._counts = counts or ListenerCounts()
        self._waiting: dict[asyncio.Task[Any], float] = {}
        """When each began to wait, oldest first."""
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def first(self, messages: AsyncIterator[Any], context: _Context) -> Any:
        """The message of a call; ends the call if it does not come in time."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self._waiting[task] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(_GRACE_S, self._end_late, loop)
        try:
            return await self._next(messages, task)
        except asyncio.CancelledError:
            if task not in self._late:
                raise
            self._late.discard(task)
            task.uncancel()
            self._counts.refuse(RefusalReason.LATE_MESSAGE, context)
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not arrive in time")
        except StopAsyncIteration:
            if not context.cancelled():  # else the client has left, or gRPC has ended the call
                self._counts.refuse(RefusalReason.NO_MESSAGE, context)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
        raise AssertionError("abort returned")

    async def _next(self, messages: AsyncIterator[Any], task: asyncio.Task[Any]) -> Any:
        try:
            return await anext(messages)
        finally:
            del self._waiting[task]
            # gRPC's iterator and its generator refer to each other, and to all that the call holds.
            if (close := getattr(aiter(messages), "aclose", None)) is not None:
                await close()

    def _end_late(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the calls that are out of time; over the limit, the oldest ones that have had their second."""
        now, num_over = loop.time(), len(self._waiting) - self._max_calls
        for index, (task, began) in enumerate(list(self._waiting.items())):
            limit_s = _GRACE_S if index < num_over else self._timeout_s
            if now - began < limit_s:
                break
            self._late.add(task)
            task.cancel()
        self._timer = loop.call_later(_GRACE_S, self._end_late, loop) if self._waiting else None


def metadata_bytes(metadata: Iterable[tuple[str, str | bytes]] | None) -> int:
    """The size of a call's metadata."""
    return sum(len(key) + len(value) + _ENTRY_BYTES for key, value in metadata or ())


async def _refuse_metadata(counts: ListenerCounts, _messages: AsyncIterator[Any], context: _Context) -> None:
    counts.refuse(RefusalReason.METADATA_SIZE, context)
    message = f"the call has over {MAX_METADATA_BYTES} bytes of metadata"
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
