"""Cadenza over Session: many requests on one stream; a message carries one step's outputs for all of them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from cadenza.calls.session import DrivenRequest, SessionDriver, size_error
from cadenza.errors import CadenzaError, DamagedStreamError, UnavailableError
from cadenza.v1 import generation_pb2
from cadenza_loadtest.driving.live import CANCELLED, INCOMPLETE, RequestInFlight
from cadenza_loadtest.driving.target import ServerFacts
from cadenza_loadtest.requests import RequestShape
from cadenza_loadtest.targets.cadenza import TOO_LARGE, CadenzaTarget, take_response


class SessionTarget(CadenzaTarget):
    """One stream per connection. A full queue is an error like others: the load continues as planned.

    A stream that breaks fails its requests with its status code; the next request opens another stream.
    """

    api = "session"

    def __init__(self, address: str, **options: Any) -> None:
        super().__init__(address, **options)
        self._sessions: list[SessionDriver] = []

    async def start(self) -> ServerFacts:
        """Connect and open the streams; raises CadenzaError if the server cannot be reached."""
        facts = await super().start()
        self._sessions = [SessionDriver(stub, facts.target, clock=self._clock) for stub in self._stubs]
        for session in self._sessions:
            session.open()
        return facts

    async def run(self, shape: RequestShape, prompt: list[int] | str, live: RequestInFlight) -> None:
        """See Target."""
        request = self._request(shape, prompt, live)
        if size_error(request) is not None:
            live.failed(TOO_LARGE)
            return
        session, sent = self._sessions[self._place(shape)], _Sent(request, live)
        session.send(sent)
        try:
            await sent.ended
        except asyncio.CancelledError:
            session.abort(sent)
            raise

    async def close(self) -> None:
        """End the streams and with them the requests in flight, and disconnect."""
        closed = CadenzaError("")
        closed.code = grpc.StatusCode[CANCELLED]
        for session in self._sessions:
            await session.close(closed)
        await super().close()


class _Sent(DrivenRequest):
    """A request that is tried once: without attempts."""

    __slots__ = ("_live", "ended")

    def __init__(self, request: generation_pb2.GenerateRequest, live: RequestInFlight) -> None:
        super().__init__(request)
        self._live = live
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def sending(self, now_s: float) -> None:
        """See DrivenRequest."""
        self._live.sent_s = now_s

    def take(self, response: generation_pb2.GenerateResponse, now_s: float) -> bool:
        """See DrivenRequest."""
        take_response(self._live, response, now_s)
        return True

    def end(self, error: CadenzaError | None) -> None:
        """See DrivenRequest; a lost stream has the code and the words of gRPC."""
        lost = error and error.__cause__
        if isinstance(lost, grpc.aio.AioRpcError):
            self._live.failed(lost.code().name, lost.details() or "")
        elif isinstance(error, UnavailableError) and error.code is None:
            self._live.failed("UNAVAILABLE", "the server ended the stream")
        elif isinstance(error, DamagedStreamError):
            self._live.failed("INTERNAL", error.message)
        elif error is not None:
            self._live.failed(error.code.name if error.code is not None else INCOMPLETE, error.message)
        if not self.ended.done():
            self.ended.set_result(None)
