"""One Session stream that carries many requests: sends and aborts them, hands over what comes, replaces a lost stream.

It knows messages, errors and attempts. What becomes of a response is the matter of each `DrivenRequest`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import grpc

from cadenza.calls.reconnect import Attempts, Positions, is_lost_connection, whole_message
from cadenza.errors import (
    CadenzaError,
    DamagedStreamError,
    FieldViolation,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    RequestLostError,
    UnavailableError,
    from_rpc_error,
    from_status,
)
from cadenza.v1 import generation_pb2, generation_pb2_grpc, types_pb2
from cadenza_common.wire.transport import MAX_REQUEST_BYTES

_LOG = logging.getLogger(__name__)
_ENVELOPE_BYTES = 16  # at most, of the SessionRequest around a request
_ABORT_TIMEOUT_S = 2.0
_SessionCall = grpc.aio.StreamStreamCall[generation_pb2.SessionRequest, generation_pb2.SessionResponse]


class DrivenRequest:
    """One request of a session. Subclasses say what becomes of its output; their methods must not wait."""

    __slots__ = ("attempts", "ended_by", "is_sent", "positions", "request", "request_id", "tenant")

    def __init__(
        self, request: generation_pb2.GenerateRequest, attempts: Attempts | None = None, tenant: bytes = b""
    ) -> None:
        """attempts: how long it is tried; requests may share them. None: the first error or loss is its end.
        tenant: SHA-256 of the token of its tenant, in a session that carries requests of several; else nothing."""
        self.request = request
        self.request_id = request.request_id
        self.attempts = attempts
        self.tenant = tenant
        self.positions = Positions(self.request_id)  # counted if there are attempts
        self.is_sent = False  # the server may have it
        self.ended_by: CadenzaError | None = None
        """Why it was ended early: it fails with it unless its last output comes."""

    def sending(self, now_s: float) -> None:
        """It goes to the transport now."""

    def take(self, response: generation_pb2.GenerateResponse, now_s: float) -> bool:
        """Take the next response, which arrived at `now_s`; False: nobody wants the rest."""
        raise NotImplementedError

    def end(self, error: CadenzaError | None) -> None:
        """It has ended: with its last response, or with an error, whose __cause__ is gRPC's if a stream was lost."""
        raise NotImplementedError

    def begin_anew(self) -> bool:
        """Forget all output of a request that the server does not know any more; False: somebody has seen it."""
        return False


class SessionDriver:
    """Runs requests over one stream at a time, which opens with the first one.

    A request whose attempts last goes on after a lost stream, an UNAVAILABLE of its own and a takeover, with no output
    lost or repeated; other errors end it alone. A stream without requests may stay open, and is not replaced.
    """

    def __init__(
        self,
        stub: generation_pb2_grpc.GenerationServiceAsyncStub,
        target: str,
        *,
        on_loss: Callable[[], None] = lambda: None,
        on_unknown: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """on_loss: called after each stream that ended; on_unknown: called with the id of a request that is not here,
        because it was aborted, or because something is wrong."""
        self._stub = stub
        self._target = target
        self._on_loss = on_loss
        self._on_unknown = on_unknown
        self._clock = clock
        self.live: dict[str, DrivenRequest] = {}
        """Requests that run, by id."""
        self.to_send: deque[DrivenRequest] = deque()
        """What the transport has not taken; a new one for each stream."""
        self._to_abort: deque[generation_pb2.SessionRequest] = deque()
        self._has_aborted = False
        """Whether the server may not have read all aborts yet."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_finishing = False
        self._closed_by: CadenzaError | None = None
        self.ended_by: CadenzaError | None = None
        """Why the last stream ended, if it is not replaced."""

    def open(self) -> asyncio.Task[None]:
        """Open the stream unless there is one; the task ends with it."""
        if self._task is None or self._task.done():
            self.ended_by = None
            self._task = asyncio.create_task(self._run(), name="cadenza-session")
        return self._task

    def send(self, live: DrivenRequest) -> None:
        """Send a request, now or as soon as the server can be reached."""
        if self._closed_by is not None:
            live.end(self._closed_by)
            return
        self.live[live.request_id] = live
        self.to_send.append(live)
        self._wake.set()
        self.open()

    def abort(self, live: DrivenRequest) -> None:
        """End a request that nobody waits for any more; does nothing if it has ended."""
        if self.live.pop(live.request_id, None) is not None and live.is_sent:
            self.abort_unread(live.request_id, live.tenant)

    def abort_unread(self, request_id: str, tenant: bytes = b"") -> None:
        """End a request at the server, which need not be in this session."""
        abort = generation_pb2.AbortRequest(request_id=request_id)
        self._to_abort.append(generation_pb2.SessionRequest(abort=abort, tenant_token_sha256=tenant))
        self._has_aborted = True
        self._wake.set()

    def end(self, live: DrivenRequest, error: CadenzaError) -> None:
        """End a request early whose output so far is wanted: it ends with its last output, or else with the error."""
        if live.request_id not in self.live or live.ended_by is not None:
            return
        live.ended_by = error
        if live.is_sent:
            self.abort_unread(live.request_id, live.tenant)
        else:
            self._end(live, error)

    async def finish(self) -> None:
        """Wait for the end of all requests and half-close; raises the CadenzaError of a stream that did not end so."""
        self._is_finishing = True
        self._wake.set()
        await self.open()
        if self.ended_by is not None:
            raise self.ended_by

    async def close(self, error: CadenzaError | None = None) -> None:
        """End the stream. Requests that still run fail with the error; without one nobody waits for them.

        Without any that run it waits, for two seconds at most, until the server has read what it is to abort.
        """
        self._closed_by = error or UnavailableError("the session is closed")
        task, self._task = self._task, None
        if task is not None:
            if self._has_aborted and not self.live:
                self._is_finishing = True
                self._wake.set()
                await asyncio.wait({task}, timeout=_ABORT_TIMEOUT_S)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if error is not None:
            for live in list(self.live.values()):
                self._end(live, error)

    # --- the stream --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            cause: CadenzaError
            is_lost = True
            try:
                await self._run_stream()
                return
            except grpc.aio.AioRpcError as error:
                cause, is_lost = from_rpc_error(error, self._target), is_lost_connection(error)
                cause.__cause__ = error
            except (DamagedStreamError, UnavailableError) as ended:
                cause = ended
            except Exception as bug:
                _LOG.exception("a session failed")
                cause, is_lost = InternalError(f"{type(bug).__name__}: {bug}"), False
            self._on_loss()
            delays = {attempts: attempts.next_delay() for attempts in self._all_attempts()} if is_lost else {}
            # The request that has run longest says when.
            delay_s = next((each for each in delays.values() if each is not None), None)
            self.ended_by = cause if delay_s is None else None
            for live in list(self.live.values()):
                if live.attempts is None or delays.get(live.attempts) is None:
                    self._end(live, cause)
            if delay_s is None:
                return
            await asyncio.sleep(delay_s)

    async def _run_stream(self) -> None:
        """Raises what ended the stream, unless it was `finish`."""
        call: _SessionCall = self._stub.Session()
        self.to_send = deque(self.live.values())
        writer = asyncio.create_task(self._write(call), name="cadenza-session-output")
        try:
            while True:
                message = await call.read()
                now_s = self._clock()
                if message is grpc.aio.EOF and self._is_finishing and not self.live:
                    return
                for attempts in self._all_attempts() if message is None else ():
                    attempts.on_damage()
                ended = f"{self._target} ended the session"
                await self.take_all(whole_message(message, generation_pb2.SessionResponse, ended).events, now_s)
        finally:
            # An abandoned aio call is never collected and its handler runs on (grpc#43462).
            call.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: _SessionCall) -> None:
        """gRPC takes one message at a time."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader knows why it ended
            while True:
                while self._to_abort:
                    await call.write(self._to_abort[0])
                    self._to_abort.popleft()
                if self.to_send:
                    live = self.to_send.popleft()
                    if self.live.get(live.request_id) is not live:
                        pass  # aborted before it was sent
                    elif live.ended_by is not None:
                        self._end(live, live.ended_by)
                    else:
                        message = live.positions.message(live.request, again=live.is_sent)
                        live.is_sent = True
                        live.sending(self._clock())
                        envelope = generation_pb2.SessionRequest(generate=message, tenant_token_sha256=live.tenant)
                        await call.write(envelope)
                elif self._is_finishing and not self.live:
                    await call.done_writing()
                    return
                else:
                    self._wake.clear()
                    await self._wake.wait()

    def _all_attempts(self) -> Iterable[Attempts]:
        """Those of all requests, each once."""
        return dict.fromkeys(live.attempts for live in self.live.values() if live.attempts is not None)

    # --- events ------------------------------------------------------------------------------------------------------

    async def take_all(self, events: Sequence[generation_pb2.SessionEvent], now_s: float) -> None:
        """Take the events of a message, which arrived at `now_s`; a subclass may let other tasks run in between."""
        for event in events:
            self.take(event, now_s)

    def take(self, event: generation_pb2.SessionEvent, now_s: float) -> None:
        """Give an event to its request."""
        live = self.live.get(event.request_id)
        if live is None:
            self._on_unknown(event.request_id)
            return
        if event.HasField("error"):
            self._take_error(live, from_status(event.error))
            return
        response, attempts = event.response, live.attempts
        if attempts is not None:
            try:
                live.positions.advance(response)
            except DamagedStreamError:
                attempts.on_damage()
                raise
            attempts.on_response()
        if not live.take(response, now_s):
            self.abort(live)
        elif event.done:
            whole = response.HasField("stats") or live.positions.finished
            error = None if whole else InternalError(f"request {live.request_id} ended without its last response")
            self._end(live, error)

    def _take_error(self, live: DrivenRequest, error: CadenzaError) -> None:
        """Send a request again that may go on; any other fails."""
        attempts, delay_s = live.attempts, None
        if attempts is None or live.ended_by is not None:
            pass
        elif isinstance(error, UnavailableError):
            # The server starts, drains or stops, and the stream may go on for others or end soon.
            delay_s = attempts.next_delay()
        else:
            attempts.on_response()
            if attempts.takes_back(error.code):
                delay_s = 0.0
            elif isinstance(error, NotFoundError) and live.positions.has_output:
                error = RequestLostError.forgotten(live.request_id, error)
                if live.begin_anew():
                    live.positions, delay_s = Positions(live.request_id), 0.0
        if delay_s is None:
            self._end(live, error)
        else:
            asyncio.get_running_loop().call_later(delay_s, self._send_again, live, self.to_send)

    def _send_again(self, live: DrivenRequest, to_send: deque[DrivenRequest]) -> None:
        """Send a request again on the stream of `to_send`; another stream has all requests from its start."""
        if to_send is self.to_send and self.live.get(live.request_id) is live:
            to_send.append(live)
            self._wake.set()

    def _end(self, live: DrivenRequest, error: CadenzaError | None) -> None:
        self.live.pop(live.request_id, None)
        if self._is_finishing:
            self._wake.set()
        live.end(error and (live.ended_by or error))


def size_error(request: generation_pb2.GenerateRequest) -> InvalidRequestError | None:
    """The error of a request over the limit of a message: a much longer one would break the stream of all others."""
    size = request.ByteSize()
    if size + _ENVELOPE_BYTES <= MAX_REQUEST_BYTES:
        return None
    sizes = _sizes_of_params(request.sampling_params) | {"": sum(part.ByteSize() for part in request.prompt)}
    field = max(sizes, key=lambda each: sizes[each])
    rule = f"has {sizes[field]} bytes, and a request can have {MAX_REQUEST_BYTES} in all"
    if not field:
        return InvalidRequestError(f"the prompt {rule}")
    return InvalidRequestError(f"{field}: {rule}", [FieldViolation(field, rule)])


def _sizes_of_params(params: types_pb2.SamplingParams) -> dict[str, int]:
    """The bytes of each field that is set, by its path."""
    rest, sizes = types_pb2.SamplingParams(), dict[str, int]()
    rest.CopyFrom(params)
    for field, _ in params.ListFields():
        before = rest.ByteSize()
        rest.ClearField(field.name)  # type: ignore[arg-type]
        sizes[f"sampling_params.{field.name}"] = before - rest.ByteSize()
    return sizes


async def abort_quietly(stub: generation_pb2_grpc.GenerationServiceAsyncStub, request_ids: Sequence[str]) -> None:
    """Abort requests that nobody reads any more: a cancelled stream alone would leave them running for their grace.

    Returns after two seconds at the latest. Without a connection they end with their grace.
    """
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_ABORT_TIMEOUT_S):
            if len(request_ids) == 1:
                await stub.Abort(generation_pb2.AbortRequest(request_id=request_ids[0]))
                return
            driver = SessionDriver(stub, "")  # one stream for all of them
            for request_id in request_ids:
                driver.abort_unread(request_id)
            await driver.finish()
