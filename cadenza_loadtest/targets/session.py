"""Cadenza over Session: many requests on one stream; a message carries one step's outputs for all of them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc

from cadenza.v1 import generation_pb2
from cadenza_common.wire.transport import MAX_REQUEST_BYTES
from cadenza_loadtest.driving.live import CANCELLED, LiveRequest
from cadenza_loadtest.driving.target import Clock, ServerFacts
from cadenza_loadtest.requests import RequestShape
from cadenza_loadtest.targets.cadenza import INCOMPLETE, TOO_LARGE, CadenzaTarget, code_name, take_response

if TYPE_CHECKING:
    from cadenza.v1.generation_pb2_grpc import GenerationServiceAsyncStub

_ENVELOPE_BYTES = 16  # at most, of the SessionRequest around a request


class SessionTarget(CadenzaTarget):
    """One stream per connection. A full queue is an error like others: the load continues as planned.

    A stream that breaks fails its requests with its status code; the next request opens another stream.
    """

    api = "session"

    def __init__(self, address: str, **options: Any) -> None:
        super().__init__(address, **options)
        self._streams: list[_Stream] = []

    async def start(self) -> ServerFacts:
        """Connect and open the streams; raises CadenzaError if the server cannot be reached."""
        facts = await super().start()
        self._streams = [_Stream(stub, self._clock) for stub in self._stubs]
        return facts

    async def run(self, shape: RequestShape, prompt: list[int] | str, live: LiveRequest) -> None:
        """See Target."""
        request = self._request(shape, prompt, live)
        if request.ByteSize() + _ENVELOPE_BYTES > MAX_REQUEST_BYTES:
            live.failed(TOO_LARGE)
            return
        place = self._place(shape)
        if self._streams[place].broken:
            self._streams[place] = _Stream(self._stubs[place], self._clock)
        await self._streams[place].run(request, live)

    async def close(self) -> None:
        """End the streams and with them the requests in flight, and disconnect."""
        for stream in self._streams:
            await stream.close()
        await super().close()


class _Stream:
    """One Session call: a writer task, a reader task, and the requests in flight."""

    def __init__(self, stub: GenerationServiceAsyncStub, clock: Clock) -> None:
        self._call: Any = stub.Session()
        self._clock = clock
        self._open: dict[str, tuple[LiveRequest, asyncio.Future[None]]] = {}
        self._outbox: deque[generation_pb2.SessionRequest] = deque()
        self._has_mail = asyncio.Event()
        self.broken = False
        self._reader = asyncio.create_task(self._read())
        self._writer = asyncio.create_task(self._write())

    async def run(self, request: generation_pb2.GenerateRequest, live: LiveRequest) -> None:
        """Run a request to its end; cancellation aborts it."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[request.request_id] = live, ended
        self._send(generation_pb2.SessionRequest(generate=request))
        try:
            await ended
        except asyncio.CancelledError:
            self._open.pop(request.request_id, None)
            abort = generation_pb2.AbortRequest(request_id=request.request_id)
            self._send(generation_pb2.SessionRequest(abort=abort))
            raise

    async def close(self) -> None:
        """End the call."""
        self._call.cancel()
        self._writer.cancel()
        await asyncio.gather(self._reader, self._writer, return_exceptions=True)

    def _send(self, message: generation_pb2.SessionRequest) -> None:
        self._outbox.append(message)
        self._has_mail.set()

    async def _write(self) -> None:
        """gRPC takes one message at a time."""
        try:
            while True:
                while self._outbox:
                    message = self._outbox.popleft()
                    if message.HasField("generate"):
                        entry = self._open.get(message.generate.request_id)
                        if entry is None:
                            continue  # aborted before it was sent
                        entry[0].sent_s = self._clock()
                    await self._call.write(message)
                self._has_mail.clear()
                await self._has_mail.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader handles the reason why the call ended

    async def _read(self) -> None:
        code, message = "UNAVAILABLE", "the server ended the stream"
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                now_s = self._clock()
                for event in response.events:
                    self._take(event, now_s)
        except grpc.aio.AioRpcError as error:
            code, message = error.code().name, error.details() or ""
        except asyncio.CancelledError:  # by `close`
            code, message = CANCELLED, ""
            raise
        finally:
            self._break(code, message)

    def _take(self, event: generation_pb2.SessionEvent, now_s: float) -> None:
        entry = self._open.get(event.request_id)
        if entry is None:
            return  # aborted by the client; its last output arrived afterwards
        live, ended = entry
        is_last = False
        if event.HasField("response"):
            is_last = take_response(live, event.response, now_s)
        elif event.done and event.HasField("error"):
            live.failed(code_name(event.error.code), event.error.message)
        if event.done:
            if not is_last:
                live.failed(INCOMPLETE)
            del self._open[event.request_id]
            if not ended.done():
                ended.set_result(None)

    def _break(self, code: str, message: str) -> None:
        self.broken = True
        self._writer.cancel()
        self._call.cancel()
        for live, ended in self._open.values():
            live.failed(code, message)
            if not ended.done():
                ended.set_result(None)
        self._open.clear()
