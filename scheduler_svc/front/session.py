"""One Session stream: many requests, whose outputs share messages."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterable
from typing import Any

from cadenza.v1 import generation_pb2 as pb
from cadenza_common.serving.slices import run_in_slices
from cadenza_common.telemetry.logs import without_messages
from scheduler_svc.convert import generation as convert
from scheduler_svc.convert.errors import AbortedEarlyError, status_of
from scheduler_svc.convert.limits import check_limits, check_request_id
from scheduler_svc.convert.plain_output import PlainOutput
from scheduler_svc.core.errors import DataLossError, RequestExistsError, RequestRejectedError
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.reader import MAX_CHUNK_BYTES, PROMPT_TOKEN_BYTES, RequestReader
from scheduler_svc.front.front import Front, open_reader, stream_replaced, within
from scheduler_svc.front.unreadable import Unreadable
from scheduler_svc.plan_loop.ports import EngineRequest
from scheduler_svc.requests.fields import RequestFields
from scheduler_svc.tenants.errors import InvalidTokenError, NamingForbiddenError
from scheduler_svc.tenants.registry import Caller

_LOG = logging.getLogger(__name__)
_MAX_ERRORS = 1000
"""Maximum errors kept for a client that does not read; beyond it the session stops reading requests."""
_MAX_UNSENT = 1000
"""Maximum requests with unsent output; beyond it the session reads no requests until some of it is sent. Else requests
that have finished would pile up for a client that sends and does not read."""
_READ_AT_ONCE = 64
"""Requests that are read before other tasks run: taking a small one takes 30 us."""
_MAX_ECHO_CHARS = 4096
"""Maximum length of a request id repeated in an error."""
TURN_BYTES = MAX_CHUNK_BYTES // 32
"""Approximate maximum size of a request's output in one turn."""
_PAUSE_BYTES = TURN_BYTES
"""After so much output the event loop runs other tasks: converting a whole message would hold it for 10 ms and more."""
_TURN_COST_BYTES = 512
"""What a turn takes beside its output, which may be a token, in bytes of output that take as long: 30 us (measured)."""


class _Entry:
    """One request of a session: tokenized by a task if it is long, then read by a reader.

    It is the listener of its live request.
    """

    __slots__ = ("fields", "plain", "reader", "request_id", "session", "task", "token_digest")

    def __init__(self, session: SessionStream, fields: RequestFields, token_digest: bytes = b"") -> None:
        self.session = session
        self.fields = fields
        self.token_digest = token_digest
        """Of SessionRequest.tenant_token_sha256, with which it came."""
        self.request_id = fields.request_id
        self.task: asyncio.Task[None] | None = None
        self.reader: RequestReader | None = None
        self.plain: PlainOutput | None = None
        """Takes what comes between the first and the last response of most requests."""

    @property
    def body_digest(self) -> bytes:
        """The digest of the message that began the request. A later message may have made this entry, to resume it."""
        return self.fields.body_digest if self.reader is None else self.reader.live.request.body_digest

    def __call__(self, live: LiveRequest) -> None:
        """Take note of new output, or that another stream has replaced this one."""
        if live.listener is not self:
            self.plain = None
        if self.plain is not None or (self.reader is not None and self.reader.has_output):
            self.session.mark(self)


class SessionStream:
    """Reads requests in one task and writes outputs in another; all outputs of one step share one message."""

    def __init__(self, front: Front, context: Any, caller: Caller) -> None:
        self._front = front
        self._context = context
        self._caller_span = front.caller_span(context)
        self._caller = caller
        self._entries: dict[str, _Entry] = {}
        self._outputs: dict[str, _Entry] = {}
        """Requests with new output by id, in the order of their turns."""
        self._errors: deque[pb.SessionEvent] = deque()
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._input_over = False

    async def run(self, requests: AsyncIterable[pb.SessionRequest]) -> None:
        """Serve until the client half-closes and all output is sent. Raises NotServingError when the service stops."""
        reading = asyncio.create_task(self._read(requests), name="session-input")
        try:
            with self._front.stream(self._wake):
                while True:
                    message = await self._collect()
                    if message is not None:
                        await self._context.write(message)
                        continue
                    if self._input_over and not self._entries and not self._errors:
                        return
                    self._front.check_serving()
                    await self._wake.wait()
                    self._wake.clear()
        finally:
            reading.cancel()
            for entry in list(self._entries.values()):
                self._drop(entry)

    def mark(self, entry: _Entry) -> None:
        """Mark a request as having new output."""
        if not self._outputs:
            self._wake.set()
        self._outputs[entry.request_id] = entry

    # --- input -------------------------------------------------------------------------------------------------------

    async def _read(self, requests: AsyncIterable[pb.SessionRequest]) -> None:
        num_read = 0
        try:
            async for request in requests:
                self._handle(request, await self._long_fields(request))
                num_read += 1
                if num_read % _READ_AT_ONCE == 0:
                    await asyncio.sleep(0)  # Messages that are there already are read without a pause.
                while len(self._errors) > _MAX_ERRORS or len(self._outputs) > _MAX_UNSENT:
                    self._drained.clear()
                    await self._drained.wait()
        except Exception as exc:
            # A disconnected client cancels this task and the writer's; any other exception is a bug.
            _LOG.error("reading from a session failed\n%s", without_messages(exc))
        finally:
            self._input_over = True
            self._wake.set()

    async def _long_fields(self, request: pb.SessionRequest | Unreadable) -> RequestFields | None:
        """Convert the fields of a long request in slices; None for a short request, and for a refused one."""
        if not isinstance(request, pb.SessionRequest) or not convert.is_long(request.generate):
            return None
        await asyncio.sleep(0)  # Parsing it was a slice of its own.
        try:
            tenant = self._caller.named(request.tenant_token_sha256)
            check_limits(request.generate)
        except (RequestRejectedError, InvalidTokenError, NamingForbiddenError):
            return None
        return await run_in_slices(convert.fields_in_slices(request.generate, tenant))

    def _handle(self, request: pb.SessionRequest | Unreadable, fields: RequestFields | None = None) -> None:
        """Handle a message; errors are reported and do not affect other requests.

        fields: of a long request, converted and within the limits.
        """
        if isinstance(request, Unreadable):
            self._report(request.request_id, request.error, done=request.request_id not in self._entries)
            return
        match request.WhichOneof("action"):
            case "generate":
                self._start(request.generate, fields, request.tenant_token_sha256)
            case "abort":
                self._abort(request.abort, request.tenant_token_sha256)
            case _:
                self._report("", RequestRejectedError("action", "must be generate or abort"), done=True)

    def _start(self, request: pb.GenerateRequest, fields: RequestFields | None, token_digest: bytes) -> None:
        request_id = request.request_id
        known = self._entries.get(request_id)
        try:
            if not request_id:
                raise RequestRejectedError("request_id", "must be given in a session: its events are identified by it")
            tenant = self._caller.named(token_digest)
            if known is not None and known.fields.tenant != tenant.name:
                raise RequestExistsError(f"request id {request_id!r} is in use in this session by another tenant")
            if fields is None:
                check_limits(request)
                fields = convert.request_fields(request, tenant)
            if fields.resume is not None:
                self._attach(_Entry(self, fields, token_digest), self._front.attach(fields))
                return
            if known is not None:
                if known.body_digest != fields.body_digest:
                    raise RequestExistsError(f"request id {request_id!r} is in use in this session with another body")
                return  # a repetition of the same request, which is being served
        except Exception as exc:
            # An error under the id of a running request must not end that request.
            self._report(request_id, exc, done=known is None)
            return
        entry = self._entries[request_id] = _Entry(self, fields, token_digest)
        try:
            builder, time_left_s = self._front.builder, self._context.time_remaining()
            if builder.is_short(fields):
                self._submit(
                    entry, builder.build(fields, now=self._front.engine.clock.monotonic(), time_left_s=time_left_s)
                )
            else:
                entry.task = asyncio.create_task(self._start_long(entry, time_left_s), name="session-tokenize")
        except Exception as exc:
            self._fail(entry, exc)

    async def _start_long(self, entry: _Entry, time_left_s: float | None) -> None:
        """Tokenize in a thread, so that other requests of the session continue."""
        try:
            request = await self._front.builder.build_off_loop(
                entry.fields, now=self._front.engine.clock.monotonic(), time_left_s=time_left_s
            )
            self._submit(entry, request)
        except Exception as exc:
            self._fail(entry, exc)

    def _submit(self, entry: _Entry, request: EngineRequest) -> None:
        self._attach(entry, self._front.submit(within(request, self._caller_span)))

    def _attach(self, entry: _Entry, live: LiveRequest) -> None:
        """Serve a request; one that this session serves already goes on from the new resume point."""
        entry.reader = open_reader(live, entry.fields)
        self._entries[entry.request_id] = entry
        self._front.engine.listen(live, entry)
        self.mark(entry)

    def _abort(self, request: pb.AbortRequest, token_digest: bytes) -> None:
        entry = self._entries.get(request.request_id)
        try:
            check_request_id(request.request_id)
            check_limits(request)
            if entry is not None and entry.token_digest == token_digest:
                # What began a request may abort it, though the token was revoked since.
                tenant = entry.fields.tenant
            else:
                tenant = self._caller.named(token_digest).name if token_digest else self._caller.name
        except (RequestRejectedError, InvalidTokenError, NamingForbiddenError) as exc:
            # Without an id, so that it is not mistaken for the end of the request.
            self._report("", exc, done=True)
            return
        if entry is None or entry.reader is not None:
            # An unknown request has finished already: its last output is sent or about to be.
            self._front.engine.abort(tenant, request.request_id)
        elif entry.fields.tenant == tenant:
            self._fail(entry, AbortedEarlyError("aborted before it began"))

    # --- output ------------------------------------------------------------------------------------------------------

    async def _collect(self) -> bytes | None:
        """A SessionResponse of new outputs and errors, up to about 1 MiB; None if there are none.

        Requests take turns: one with more output than its turn takes goes on after all others, in this message if it
        has room left, else in the next one. Errors have half of a message while there are outputs.
        """
        parts: list[bytes] = []
        num_bytes = 0
        max_error_bytes = MAX_CHUNK_BYTES // 2 if self._outputs else MAX_CHUNK_BYTES
        while self._errors and num_bytes < max_error_bytes:
            event = self._errors.popleft()
            parts.append(_as_field(event))
            num_bytes += len(parts[-1])
        self._drained.set()
        pause_at = _PAUSE_BYTES
        while self._outputs and num_bytes < MAX_CHUNK_BYTES:
            # `_take_turn` marks a request again that has more: behind all others.
            marked, self._outputs = self._outputs, {}
            entries = iter(marked.values())
            for entry in entries:
                plain = entry.plain
                if plain is not None and (part := plain.take_event()) is not None:
                    parts.append(part)
                    num_bytes += len(part)
                else:
                    num_bytes += self._take_turn(entry, parts, min(TURN_BYTES, MAX_CHUNK_BYTES - num_bytes))
                    pause_at -= _TURN_COST_BYTES
                if num_bytes >= pause_at or num_bytes >= MAX_CHUNK_BYTES:
                    break
            self._outputs = {entry.request_id: entry for entry in entries} | self._outputs
            if num_bytes >= pause_at:
                pause_at = num_bytes + _PAUSE_BYTES
                await asyncio.sleep(0)
        return b"".join(parts) if parts else None

    def _take_turn(self, entry: _Entry, parts: list[bytes], max_bytes: int) -> int:
        """Add output of the request whose turn it is; returns its approximate size in bytes."""
        request_id, reader = entry.request_id, entry.reader
        if reader is None:
            return 0
        if reader.live.listener is not entry:
            return self._end(entry, stream_replaced())
        try:
            chunk = reader.take(max_bytes)
        except DataLossError as exc:
            return self._end(entry, exc)
        if chunk is None:
            return self._end(entry, reader.live.error) if reader.live.error is not None else 0
        event = pb.SessionEvent(request_id=request_id, done=chunk.is_last)
        with_ids = entry.fields.return_prompt_token_ids
        num_bytes = chunk.num_bytes + len(request_id)
        if with_ids and chunk.is_first:
            num_bytes += PROMPT_TOKEN_BYTES * len(reader.live.request.spec.prompt_token_ids)
        convert.fill_response(event.response, reader.live, chunk, with_prompt_ids=with_ids)
        parts.append(_as_field(event))
        if chunk.is_first:
            entry.plain = PlainOutput.of(reader)
        if chunk.is_last:
            self._drop(entry)
        elif not chunk.is_whole or reader.live.error is not None:
            self._outputs[request_id] = entry
        return num_bytes

    def _end(self, entry: _Entry, exc: Exception) -> int:
        """End a request that ran with an error; returns 0, the bytes of output."""
        self._drop(entry)
        self._report(entry.request_id, exc, done=True, refused=False)
        return 0

    def _fail(self, entry: _Entry, exc: Exception) -> None:
        self._drop(entry)
        self._report(entry.request_id, exc, done=True)

    def _report(self, request_id: str, exc: Exception, *, done: bool, refused: bool = True) -> None:
        """Report an error; `refused`: the request never ran. The engine logs the end of one that did."""
        if refused:
            self._front.log_refused(request_id, exc)
        event = pb.SessionEvent(request_id=request_id[:_MAX_ECHO_CHARS], done=done)
        event.error.CopyFrom(status_of(exc))
        self._errors.append(event)
        self._wake.set()

    def _drop(self, entry: _Entry) -> None:
        """Remove a request; the engine aborts a running one unless it has a grace or another stream."""
        self._entries.pop(entry.request_id, None)
        self._outputs.pop(entry.request_id, None)
        if entry.task is not None and entry.task is not asyncio.current_task():
            entry.task.cancel()
        if entry.reader is not None:
            self._front.engine.detach(entry.reader.live, entry, handed_over=entry.reader.done)


def _as_field(event: pb.SessionEvent) -> bytes:
    """The event as a field of a SessionResponse: messages of one type are merged by joining their bytes."""
    return pb.SessionResponse(events=(event,)).SerializeToString()
