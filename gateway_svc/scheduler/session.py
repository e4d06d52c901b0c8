"""One long-lived Session stream for the requests of many HTTP clients; a lost one is replaced, and nobody notices."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from cadenza.calls.convert import delta_from_proto, resume_to_proto
from cadenza.calls.output_collector import OutputCollector
from cadenza.calls.reconnect import Attempts, is_lost_connection, whole_message
from cadenza.errors import (
    CadenzaError,
    DamagedStreamError,
    InternalError,
    NotFoundError,
    PermissionDeniedError,
    RequestLostError,
    UnauthenticatedError,
    UnavailableError,
    from_rpc_error,
    from_status,
)
from cadenza.v1 import generation_pb2
from gateway_svc.scheduler.inbox import Inbox

if TYPE_CHECKING:
    from cadenza.v1.generation_pb2_grpc import GenerationServiceAsyncStub

_LOG = logging.getLogger(__name__)
_EVENTS_AT_ONCE = 256
"""Events of a message that are taken before other tasks run: 4 ms at some 15 us each."""
_SessionCall = grpc.aio.StreamStreamCall[generation_pb2.SessionRequest, generation_pb2.SessionResponse]


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One prompt that runs."""

    request: generation_pb2.GenerateRequest
    collector: OutputCollector
    inbox: Inbox
    index: int
    """Of the prompt in its HTTP request."""
    tenant: bytes = b""
    """SHA-256 of the token of its tenant, in a session that carries requests of several; else nothing."""
    is_streamed: bool = False
    """Whether the inbox gets the deltas; otherwise the client has seen nothing before the end."""
    is_sent: bool = False
    is_resumed: bool = False
    """Whether the last message about it was a resume."""
    run_alone: Callable[[LiveRequest], None] | None = None
    """Runs it in a session of its own key, for when this one may not name its tenant."""
    ended_by: CadenzaError | None = None
    """Why it was ended early: it fails with it unless its last output comes."""
    attempts: Attempts = field(init=False)
    """Its own: how long it is tried does not depend on other requests."""


class GatewaySession:
    """Runs requests over one stream at a time, until `close`.

    After a lost stream another one brings the rest of each request, for `timeout_s` seconds without a response to it. A
    request whose rest the scheduler does not have any more is begun anew if its client has seen nothing of it.
    """

    def __init__(
        self,
        stub: GenerationServiceAsyncStub,
        target: str,
        timeout_s: float,
        *,
        was_reached: Callable[[], bool],
        on_response: Callable[[], None],
        on_loss: Callable[[], None],
    ) -> None:
        """was_reached: whether the scheduler ever answered; without, there is no point in waiting for it."""
        self._stub = stub
        self._target = target
        self._timeout_s = timeout_s
        self._was_reached = was_reached
        self._on_response = on_response
        self._on_loss = on_loss
        self._live: dict[str, LiveRequest] = {}
        self._to_start: deque[str] = deque()
        self._to_abort: deque[LiveRequest] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._attempts = self._new_attempts(math.inf)
        """Those to open a stream: each request has its own time."""

    @property
    def num_requests(self) -> int:
        """Requests that run."""
        return len(self._live)

    def start(self, live: LiveRequest) -> None:
        """Send a request, now or as soon as the scheduler can be reached."""
        request_id = live.request.request_id
        if self._is_closed:
            live.inbox.fail(UnavailableError("the gateway is stopping"))
            return
        live.attempts = self._new_attempts(self._timeout_s)
        self._live[request_id] = live
        self._to_start.append(request_id)
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="gateway-session")

    def abort(self, live: LiveRequest) -> None:
        """End a request that nobody waits for any more; does nothing if it has ended."""
        request_id = live.request.request_id
        if self._live.pop(request_id, None) is not None and live.is_sent:
            self._to_abort.append(live)
            self._wake.set()

    def end(self, live: LiveRequest, error: CadenzaError) -> None:
        """End a request early whose output so far is wanted: it ends with its last output, or else with the error."""
        if live.request.request_id not in self._live or live.ended_by is not None:
            return
        live.ended_by = error
        if live.is_sent:
            self._to_abort.append(live)
            self._wake.set()
        else:
            self._fail(error, [live])

    async def close(self) -> None:
        """End the stream; requests that still run end with UnavailableError, and are aborted by the lost stream."""
        self._is_closed = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._fail(UnavailableError("the gateway is stopping"), list(self._live.values()))

    def _new_attempts(self, timeout_s: float) -> Attempts:
        def keeps_trying() -> bool:
            return self._was_reached() and not self._is_closed

        return Attempts(timeout_s, keeps_trying, self._on_response)

    # --- the stream --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Keep a stream open as long as there are requests; without any it may stay open, and is not replaced."""
        while True:
            try:
                await self._run_stream()
            except grpc.aio.AioRpcError as error:
                cause = from_rpc_error(error, self._target)
                lost = is_lost_connection(error)
            except DamagedStreamError as damage:
                cause, lost = damage, True
            except UnavailableError as ended:
                cause, lost = ended, True
            except Exception as bug:
                _LOG.exception("a session failed")
                cause, lost = InternalError(f"{type(bug).__name__}: {bug}"), False
            self._on_loss()
            self._fail(cause, [live for live in self._live.values() if not lost or live.attempts.next_delay() is None])
            delay_s = self._attempts.next_delay() if self._live else None
            if delay_s is None:
                self._fail(cause, list(self._live.values()))
                self._attempts = self._new_attempts(math.inf)
                return
            await asyncio.sleep(delay_s)

    async def _run_stream(self) -> None:
        call: _SessionCall = self._stub.Session()
        self._to_start = deque(self._live)
        writer = asyncio.create_task(self._write(call), name="gateway-session-output")
        try:
            while True:
                response = whole_message(
                    await call.read(), generation_pb2.SessionResponse, f"{self._target} ended the session"
                )
                self._attempts.on_response()
                first, later = self._by_turn(response.events)
                for events in (first, later):
                    for number, event in enumerate(events, start=1):
                        self._take(event)
                        if number % _EVENTS_AT_ONCE == 0 or (events is first and number == len(first)):
                            await asyncio.sleep(0)  # answers are written
        finally:
            # An abandoned aio call is never collected and its handler runs on (grpc#43462).
            call.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: _SessionCall) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader knows why it ended
            while True:
                while self._to_abort:
                    gone = self._to_abort[0]
                    abort = generation_pb2.AbortRequest(request_id=gone.request.request_id)
                    await call.write(generation_pb2.SessionRequest(abort=abort, tenant_token_sha256=gone.tenant))
                    self._to_abort.popleft()
                if self._to_start:
                    live = self._live.get(self._to_start.popleft())
                    if live is not None and live.ended_by is not None:
                        self._fail(live.ended_by, [live])
                    elif live is not None:
                        message = resume_to_proto(live.request, live.collector)
                        live.is_sent, live.is_resumed = True, message.HasField("resume")
                        await call.write(
                            generation_pb2.SessionRequest(generate=message, tenant_token_sha256=live.tenant)
                        )
                    continue
                self._wake.clear()
                if not self._to_abort:
                    await self._wake.wait()

    def _by_turn(
        self, events: Sequence[generation_pb2.SessionEvent]
    ) -> tuple[list[generation_pb2.SessionEvent], list[generation_pb2.SessionEvent]]:
        """The events of requests that have had none, and those of all others.

        Who waits for a first token is served before the streams that go on: of 64, each takes some 70 us.
        """
        first: list[generation_pb2.SessionEvent] = []
        later: list[generation_pb2.SessionEvent] = []
        for event in events:
            live = self._live.get(event.request_id)
            (later if live is None or live.collector.has_responses else first).append(event)
        return first, later

    # --- events ------------------------------------------------------------------------------------------------------

    def _take(self, event: generation_pb2.SessionEvent) -> None:
        live = self._live.get(event.request_id)
        if live is None:  # it was aborted
            return
        if event.WhichOneof("event") == "error":
            self._take_error(live, from_status(event.error))
            return
        delta = live.collector.add(delta_from_proto(event.response, live.collector.prompt_token_ids))
        live.attempts.on_response()
        if live.is_streamed:
            live.inbox.put(live.index, delta)
            if live.inbox.error is not None:
                self.abort(live)
                return
        if event.done:
            del self._live[event.request_id]
            if live.collector.finished:
                live.inbox.end()
            else:
                live.inbox.fail(InternalError(f"request {event.request_id} ended without its last response"))

    def _take_error(self, live: LiveRequest, error: CadenzaError) -> None:
        """Send a request again that may go on, else report the error to its client."""
        request_id, collector = live.request.request_id, live.collector
        if live.ended_by is not None or (live.run_alone is not None and _may_be_naming(error)):
            self._fail(error, [live])
            return
        if isinstance(error, UnavailableError):
            delay_s = live.attempts.next_delay()
            if delay_s is not None:
                asyncio.get_running_loop().call_later(delay_s, self._send_again, request_id)
                return
        else:
            live.attempts.on_response()
        if live.attempts.takes_back(error.code):
            self._send_again(request_id)
            return
        if live.is_resumed and isinstance(error, NotFoundError):
            if not live.is_streamed:
                collector.clear()
                self._send_again(request_id)
                return
            error = RequestLostError.forgotten(request_id, error)
        self._fail(error, [live])

    def _send_again(self, request_id: str) -> None:
        if request_id in self._live:
            self._to_start.append(request_id)
            self._wake.set()

    def _fail(self, error: CadenzaError, requests: Sequence[LiveRequest]) -> None:
        """End requests with an error; one that this session may not name runs in that of its own key."""
        for live in requests:
            del self._live[live.request.request_id]
            run_alone, live.run_alone = live.run_alone, None
            if live.ended_by is not None or run_alone is None or not _may_be_naming(error):
                live.inbox.fail(live.ended_by or error)
                continue
            self._on_loss()
            live.tenant, live.is_sent = b"", False
            run_alone(live)


def _may_be_naming(error: CadenzaError) -> bool:
    """Whether a session may have been refused for the tenant that it named: it has lost the right, or its own token.

    An unknown token is that of the gateway or that of the client, which its own session finds out.
    """
    if isinstance(error, PermissionDeniedError):
        return "may_name_tenants" in error.message
    return isinstance(error, UnauthenticatedError)
