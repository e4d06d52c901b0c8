"""Many requests over a Session stream, with a window that adapts to the capacity of the server's queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from cadenza.calls.convert import delta_from_proto, resume_to_proto
from cadenza.calls.output_collector import OutputCollector
from cadenza.calls.reconnect import Attempts, abort_quietly, is_lost_connection, whole_message
from cadenza.errors import (
    CadenzaError,
    DamagedStreamError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    QueueFullError,
    UnavailableError,
    from_rpc_error,
    from_status,
)
from cadenza.outputs import RequestOutput
from cadenza.v1 import generation_pb2
from cadenza_common.wire.transport import MAX_REQUEST_BYTES

if TYPE_CHECKING:
    from cadenza.v1.generation_pb2_grpc import GenerationServiceAsyncStub

_MAX_WAITING = 512
"""Requests in flight beyond what the executors compute at once: half of what the server's queue holds by default."""
_INFO_TIMEOUT_S = 5.0
_DEFAULT_RETRY_S = 0.2
_ENVELOPE_BYTES = 16  # at most, of the SessionRequest around a request
OnOutput = Callable[[RequestOutput], None]
_SessionCall = grpc.aio.StreamStreamCall[generation_pb2.SessionRequest, generation_pb2.SessionResponse]


@dataclass(slots=True)
class BatchItem:
    """One request of a batch and its outcome."""

    request: generation_pb2.GenerateRequest
    collector: OutputCollector
    error: CadenzaError | None = None
    done: bool = False
    is_sent: bool = False
    """Whether the server may have it."""
    is_resumed: bool = False
    """Whether the last message about it was a resume."""


@dataclass(slots=True)
class _Window:
    """Limits the requests in flight: shrinks to the number that the queue accepted, grows by one with each that
    ends."""

    most: int = _MAX_WAITING
    size: int = _MAX_WAITING
    pending: deque[int] = field(default_factory=deque)
    in_flight: set[int] = field(default_factory=set)
    not_before: float = 0.0  # on the event loop's clock

    def returned(self, index: int) -> None:
        """The request is to be sent again."""
        self.in_flight.discard(index)
        # Refusals arrive in the order of sending; the first refused request stays at the front.
        position = next((at for at, other in enumerate(self.pending) if other > index), len(self.pending))
        self.pending.insert(position, index)

    def refused(self, index: int, now: float, retry_after_s: float | None) -> None:
        """The queue is full."""
        self.returned(index)
        self.size = max(1, len(self.in_flight))
        self.not_before = max(self.not_before, now + (_DEFAULT_RETRY_S if retry_after_s is None else retry_after_s))

    def lost(self) -> None:
        """The stream is lost: those in flight go first on the next one."""
        self.pending.extendleft(sorted(self.in_flight, reverse=True))
        self.in_flight.clear()

    def ended(self, index: int) -> None:
        self.in_flight.discard(index)
        self.size = min(self.most, self.size + 1)


class SessionBatch:
    """Runs requests over one Session stream at a time until all have ended.

    A request refused because the server's queue is full is sent again after the delay in the server's RetryInfo,
    without a limit; any other error ends only that request. After a lost connection another stream brings the rest.
    Leaving `run` early, for any reason, aborts the requests in flight. `on_output` gets the result of each request as
    it ends; the result of a failed request is not finished.
    """

    def __init__(
        self,
        stub: GenerationServiceAsyncStub,
        target: str,
        items: Sequence[BatchItem],
        attempts: Attempts,
        on_output: OnOutput | None = None,
    ) -> None:
        self._stub = stub
        self._target = target
        self._items = items
        self._attempts = attempts
        self._on_output = on_output
        self._index_of = {item.request.request_id: index for index, item in enumerate(items)}
        for item in items:
            _refuse_too_large(item)
        self._window = _Window(pending=deque(index for index, item in enumerate(items) if not item.done))
        self._num_open = len(self._window.pending)
        self._wake = asyncio.Event()
        self._call: _SessionCall | None = None

    async def run(self) -> None:
        """Run all items; raises the CadenzaError of a stream that broke and could not be replaced in time."""
        for item in self._items:
            if item.done:
                self._report(item)
        if self._num_open > _MAX_WAITING:
            self._window.most = self._window.size = _MAX_WAITING + await self._num_running_at_once()
        try:
            while self._num_open > 0:
                try:
                    await self._run_stream()
                except grpc.aio.AioRpcError as error:
                    cause = from_rpc_error(error, self._target)
                    if not is_lost_connection(error):
                        raise cause from None
                    await self._attempts.wait(cause)
                except DamagedStreamError as damage:
                    await self._attempts.wait_after_damage(damage)
                self._window.lost()
        finally:
            await self.leave()

    async def leave(self) -> None:
        """End the stream, and the requests in flight at the server; returns soon, whatever the server does."""
        call, self._call = self._call, None
        unfinished = [each.request.request_id for each in self._items if each.is_sent and not each.done]
        for item in self._items:
            item.is_sent = False
        if call is not None:
            # An abandoned aio call is never collected and its handler runs on (grpc#43462).
            call.cancel()
        if unfinished:
            await abort_quietly(self._stub, unfinished)

    async def _run_stream(self) -> None:
        call: _SessionCall = self._stub.Session()
        self._call = call
        writer = asyncio.create_task(self._write(call))
        try:
            while self._num_open > 0:
                response = whole_message(
                    await call.read(),
                    generation_pb2.SessionResponse,
                    f"{self._target} ended the session with {self._num_open} requests unfinished",
                )
                for event in response.events:
                    self._take(event)
        finally:
            call.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _num_running_at_once(self) -> int:
        """Return how many sequences the server's executors compute at once; 0 if it does not say."""
        try:
            info = await self._stub.GetServerInfo(generation_pb2.GetServerInfoRequest(), timeout=_INFO_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return 0
        return sum(executor.max_num_seqs for executor in info.executors)

    async def _write(self, call: _SessionCall) -> None:
        window, loop = self._window, asyncio.get_running_loop()
        try:
            while self._num_open > 0:
                delay = window.not_before - loop.time()
                if not window.pending or len(window.in_flight) >= window.size:
                    self._wake.clear()
                    await self._wake.wait()
                elif delay > 0:
                    await asyncio.sleep(delay)
                else:
                    index = window.pending.popleft()
                    window.in_flight.add(index)
                    item = self._items[index]
                    message = resume_to_proto(item.request, item.collector)
                    item.is_sent, item.is_resumed = True, message.HasField("resume")
                    await call.write(generation_pb2.SessionRequest(generate=message))
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader handles the reason why the call ended

    def _take(self, event: generation_pb2.SessionEvent) -> None:
        index = self._index_of.get(event.request_id)
        if index is None or self._items[index].done:
            raise DamagedStreamError(
                f"{self._target} sent output of request {event.request_id!r}, which this session does not have"
            )
        item = self._items[index]
        kind = event.WhichOneof("event")
        if kind == "error":
            error = from_status(event.error)
            if not isinstance(error, UnavailableError):
                self._attempts.on_response()
            if self._send_again(index, error):
                self._wake.set()
                return
            item.error = error
        elif kind == "response":
            item.collector.add(delta_from_proto(event.response, item.collector.prompt_token_ids))
            self._attempts.on_response()
        if event.done or item.error is not None:
            if item.error is None and not item.collector.finished:
                item.error = InternalError(f"request {event.request_id} ended without its last response")
            self._end(index)

    def _send_again(self, index: int, error: CadenzaError) -> bool:
        """Put a request that ended with an error back among the pending ones; False if the error is its end."""
        item, now = self._items[index], asyncio.get_running_loop().time()
        if isinstance(error, QueueFullError):
            item.is_sent = False
            self._window.refused(index, now, error.retry_after_s)
            return True
        if isinstance(error, UnavailableError):
            # The server starts, drains or stops, and the stream may go on for others or end soon.
            delay_s = self._attempts.next_delay()
            if delay_s is None:
                return False
            self._window.returned(index)
            self._window.not_before = max(self._window.not_before, now + delay_s)
            return True
        if item.is_resumed and isinstance(error, NotFoundError):
            # The server was restarted. Nobody has seen the output, so it may come out differently.
            item.collector.clear()
        elif not self._attempts.takes_back(error.code):
            return False
        self._window.returned(index)
        return True

    def _end(self, index: int) -> None:
        self._items[index].done = True
        self._num_open -= 1
        self._window.ended(index)
        self._wake.set()
        self._report(self._items[index])

    def _report(self, item: BatchItem) -> None:
        if self._on_output is not None:
            self._on_output(item.collector.result())


def _refuse_too_large(item: BatchItem) -> None:
    """End a request that exceeds the limit of a message: a much longer one would break the stream and all others."""
    size = item.request.ByteSize()
    if size + _ENVELOPE_BYTES > MAX_REQUEST_BYTES:
        message = f"the request has {size} bytes, and a message can have {MAX_REQUEST_BYTES} at most"
        item.error, item.done = InvalidRequestError(message), True


def batch_results(items: Sequence[BatchItem]) -> list[RequestOutput]:
    """The results in the order of the items; raises the first failing item's error, with the results of the others."""
    errors = {index: item.error for index, item in enumerate(items) if item.error is not None}
    if not errors:
        return [item.collector.result() for item in items]
    first = min(errors)
    error = errors[first]
    if len(items) > 1:
        error.prompt_index = first
    error.errors = errors
    error.outputs = [None if index in errors else item.collector.result() for index, item in enumerate(items)]
    raise error
