"""Many requests over a session, with a window that adapts to the capacity of the server's queue."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Callable, Sequence

import grpc

from cadenza.calls.output_collector import OutputCollector
from cadenza.calls.reconnect import Attempts
from cadenza.calls.session import DrivenRequest, SessionDriver, abort_quietly, size_error
from cadenza.errors import CadenzaError, DamagedStreamError, QueueFullError, UnavailableError
from cadenza.outputs import RequestOutput
from cadenza.v1 import generation_pb2, generation_pb2_grpc

_MAX_WAITING = 512
"""Requests in flight beyond what the executors compute at once: half of what the server's queue holds by default."""
_INFO_TIMEOUT_S = 5.0
_DEFAULT_RETRY_S = 0.2
OnOutput = Callable[[RequestOutput], None]


class BatchItem(DrivenRequest):
    """One request of a batch and its outcome."""

    __slots__ = ("batch", "collector", "done", "error", "index")
    batch: SessionBatch

    def __init__(self, request: generation_pb2.GenerateRequest, collector: OutputCollector) -> None:
        super().__init__(request)
        self.collector = collector
        self.error: CadenzaError | None = None
        self.done = False
        self.index = 0  # in the batch

    def sending(self, now_s: float) -> None:
        self.batch.wake.set()

    def take(self, response: generation_pb2.GenerateResponse, now_s: float) -> bool:
        self.collector.add(response)
        return True

    def end(self, error: CadenzaError | None) -> None:
        self.batch.on_end(self, error)

    def begin_anew(self) -> bool:
        """Nobody has seen the output, so it may come out differently."""
        self.collector.clear()
        return True


class SessionBatch:
    """Runs requests over one Session stream at a time until all have ended.

    A request refused because the server's queue is full is sent again after the delay in the server's RetryInfo,
    without a limit; any other error ends only that request. After a lost connection another stream brings the rest.
    Leaving `run` early, for any reason, aborts the requests in flight. `on_output` gets the result of each request as
    it ends; the result of a failed request is not finished.

    A window limits the requests in flight: it shrinks to the number that the queue accepted, and grows by one with each
    that ends.
    """

    def __init__(
        self,
        stub: generation_pb2_grpc.GenerationServiceAsyncStub,
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
        self._driver = SessionDriver(stub, target, on_unknown=self._refuse_unknown)
        for index, item in enumerate(items):
            item.batch, item.index, item.attempts = self, index, attempts
            item.error = size_error(item.request)
            item.done = item.error is not None
        self._pending = [item.index for item in items if not item.done]  # a heap
        self._num_open = len(self._pending)
        self._num_in_flight = 0
        self._most = self._window = _MAX_WAITING
        self._not_before = 0.0  # on the event loop's clock
        self.wake = asyncio.Event()
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Run all items; raises the CadenzaError of a stream that broke and could not be replaced in time."""
        for item in self._items:
            if item.done:
                self._report(item)
        if self._num_open > _MAX_WAITING:
            self._most = self._window = _MAX_WAITING + await self._num_running_at_once()
        try:
            while self._num_open > 0 and self._failure is None:
                await self._send_next()
            if self._failure is not None:
                raise self._failure from None
        finally:
            await self.leave()

    async def leave(self) -> None:
        """End the stream, and the requests in flight at the server; returns soon, whatever the server does."""
        self._failure = self._failure or UnavailableError("the session was closed")
        self.wake.set()
        unfinished = [each.request_id for each in self._items if each.is_sent and not each.done]
        for item in self._items:
            item.is_sent = False
        await self._driver.close()
        if unfinished:
            await abort_quietly(self._stub, unfinished)

    async def _send_next(self) -> None:
        """Send a request, or wait until something has changed."""
        delay_s = self._not_before - asyncio.get_running_loop().time()
        may_send = self._pending and self._num_in_flight < self._window and not self._driver.to_send
        if may_send and delay_s <= 0:
            self._num_in_flight += 1
            self._driver.send(self._items[heapq.heappop(self._pending)])
            return
        self.wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s if may_send else None):
                await self.wake.wait()

    async def _num_running_at_once(self) -> int:
        """Return how many sequences the server's executors compute at once; 0 if it does not say."""
        try:
            info = await self._stub.GetServerInfo(generation_pb2.GetServerInfoRequest(), timeout=_INFO_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return 0
        return sum(executor.max_num_seqs for executor in info.executors)

    def on_end(self, item: BatchItem, error: CadenzaError | None) -> None:
        """A request has ended. One that the queue refused is sent again; the end of the stream is that of all."""
        self.wake.set()
        if error is not None and error is self._driver.ended_by:
            if type(error) is UnavailableError and error.__cause__ is None:
                error = UnavailableError(f"{error.message} with {self._num_open} requests unfinished")
            self._failure = self._failure or error
            return
        self._num_in_flight -= 1
        if isinstance(error, QueueFullError):
            item.is_sent = False
            heapq.heappush(self._pending, item.index)
            self._window = max(1, self._num_in_flight)
            delay_s = _DEFAULT_RETRY_S if error.retry_after_s is None else error.retry_after_s
            self._not_before = max(self._not_before, asyncio.get_running_loop().time() + delay_s)
            return
        item.error, item.done = error, True
        self._num_open -= 1
        self._window = min(self._most, self._window + 1)
        self._report(item)

    def _refuse_unknown(self, request_id: str) -> None:
        self._attempts.on_damage()
        raise DamagedStreamError(
            f"{self._target} sent output of request {request_id!r}, which this session does not have"
        )

    def _report(self, item: BatchItem) -> None:
        if self._on_output is None:
            return
        try:
            self._on_output(item.collector.result())
        except Exception as error:  # the caller's: it ends the batch, not the session
            self._failure = self._failure or error


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
