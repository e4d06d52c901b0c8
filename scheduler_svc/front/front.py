"""State shared by all calls: the engine, the request builder and the open streams, which write in turns.

Turns wake Generate streams that have new output a few at a time, so that they do not hold up the next step.

A step has output for every stream, and a message costs the event loop some 40 us (decision 0024). If all streams wrote
at once, the plan of the next step would wait behind a thousand messages. With turns the event loop looks at results
after every few of them, and when messages take longer than steps, a stream sends the tokens of several steps at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import grpc
from grpc_status import rpc_status

from cadenza_common.telemetry.trace_context import TRACEPARENT, TRACESTATE, TraceContext, parse_traceparent
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.convert.errors import NotServingError, StreamReplacedError, code_of, status_of
from scheduler_svc.core.errors import PreconditionError, RequestRejectedError
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.faults import FaultKind
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.reader import RequestReader
from scheduler_svc.front.process_memory import leave_out_long_prompt
from scheduler_svc.plan_loop.ports import EngineRequest
from scheduler_svc.requests.builder import RequestBuilder, check_resume
from scheduler_svc.requests.fields import OutputMode, RequestFields
from scheduler_svc.tenants.registry import Caller

_LOG = logging.getLogger(__name__)
AT_ONCE = 4
"""Streams that are woken in one turn of the event loop."""


class Front:
    """Connects calls to the engine. Created before the engine starts; `open` accepts calls, `stop` rejects them."""

    def __init__(self, engine: Engine, config: SchedulerConfig, *, version: str = "") -> None:
        self.engine = engine
        self.config = config
        self.version = version
        self.address = ""
        """Where the service listens; set before it takes calls."""
        self._builder: RequestBuilder | None = None
        self.registry = engine.quotas.registry
        """The tenants."""
        self.turns = StreamTurns()
        """Of the Generate streams."""
        self._streams: set[asyncio.Event] = set()
        self._num_clients = 0
        self._stop_reason = ""
        self.is_leaving = False
        """Whether the service is to stop once its requests have ended: it takes no new ones any more."""

    @property
    def builder(self) -> RequestBuilder:
        """The request builder; raises NotServingError before `open` and after `stop`."""
        self.check_serving()
        assert self._builder is not None
        return self._builder

    @property
    def num_streams(self) -> int:
        """Number of open client streams."""
        return self._num_clients

    def open(self, builder: RequestBuilder) -> None:
        """Accept calls: the engine has started. Called again with another builder when the model changes."""
        self._builder = builder

    def stop(self, detail: str = "") -> None:
        """Reject calls from now on; streams send their available output, then end with UNAVAILABLE.

        detail: what the status adds for them. A second call changes nothing.
        """
        self._stop_reason = self._stop_reason or "the service is stopping" + detail
        for wake in self._streams:
            wake.set()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called: streams no longer wait for output."""
        return bool(self._stop_reason)

    @property
    def unserved(self) -> str:
        """Why requests are not served, in words for callers without a key too; empty: they are."""
        if self.is_stopped or self.engine.failure is not None:
            return "it is stopping"
        if self._builder is None:
            return "it is starting"
        if self.engine.draining:
            return "it is draining"
        return self.engine.journal.problem or ("" if self.engine.executors.can_serve else "no executor takes requests")

    def check_serving(self) -> None:
        """Raise NotServingError unless calls are served."""
        if self._stop_reason:
            raise NotServingError(self._stop_reason)
        if self.engine.failure is not None:
            raise NotServingError(f"the service is stopping: {self.engine.failure}")
        if self._builder is None:
            raise NotServingError(f"the service is starting: it waits for {', '.join(self.config.executor)}")

    def submit(self, request: EngineRequest) -> LiveRequest:
        """Queue a request; raises as Engine.submit."""
        live = self.engine.submit(request)
        leave_out_long_prompt(len(request.spec.prompt_token_ids))
        return live

    def caller_of(self, context: Any) -> Caller:
        """Who a call is from; raises UnauthenticatedError."""
        registry = self.registry
        return registry.caller(None if registry.is_open else context.invocation_metadata())

    def attach(self, fields: RequestFields) -> LiveRequest:
        """The existing request that a message resumes.

        Raises RequestRejectedError, UnknownRequestError, NotServingError.
        """
        self.check_serving()
        check_resume(fields)
        return self.engine.attach(fields.tenant, fields.request_id)

    def caller_span(self, context: Any) -> TraceContext | None:
        """The caller's span by the metadata of a call; None if there is none, or traces are not sent."""
        if self.config.otlp_traces_endpoint is None:
            return None
        metadata = {
            key: value for key, value in context.invocation_metadata() or () if key in (TRACEPARENT, TRACESTATE)
        }
        return parse_traceparent(str(metadata.get(TRACEPARENT, "")), str(metadata.get(TRACESTATE, "")))

    def log_refused(self, request_id: str, exc: Exception) -> None:
        """Count a request that never ran, and log its status code and field: its message may quote the prompt."""
        self.engine.faults.record(FaultKind.REQUEST_REFUSED)
        self.engine.numbers.refusals[code_of(exc).name] += 1
        if self.config.log_requests:
            field = f", {exc.field}" if isinstance(exc, RequestRejectedError | PreconditionError) else ""
            about = {"request_id": request_id[:100]}
            _LOG.info("request %.100r: refused with %s%s", request_id, code_of(exc).name, field, extra=about)

    @contextmanager
    def stream(self, wake: asyncio.Event, *, is_client: bool = True) -> Iterator[None]:
        """Register a stream to be woken by `stop`, and count it if it is a client's."""
        self._streams.add(wake)
        self._num_clients += is_client
        try:
            yield
        finally:
            self._streams.discard(wake)
            self._num_clients -= is_client


def within(request: EngineRequest, span: TraceContext | None) -> EngineRequest:
    """The request as a part of its caller's span by the call's metadata; that of its own field overrides it."""
    if span is None or (request.trace is not None and request.trace.trace_id != span.trace_id):
        return request
    return replace(request, trace=replace(request.trace or span, tracestate=span.tracestate))


def open_reader(live: LiveRequest, fields: RequestFields) -> RequestReader:
    """A reader for a stream of this request; raises RequestRejectedError for a wrong resume point.

    A stream of a request that had one before starts at once, so that the client learns that it is attached.
    """
    return RequestReader(
        live,
        final_only=fields.output_mode is OutputMode.FINAL,
        resume=fields.resume,
        starts_at_once=fields.starts_at_once or fields.resume is not None or live.had_stream,
        with_text_ends=fields.return_text_ends,
    )


def stream_replaced() -> StreamReplacedError:
    """The error of a stream whose request another stream has taken over."""
    return StreamReplacedError("another stream has taken this request over")


async def abort_with(context: Any, exc: Exception) -> NoReturn:
    """End the call with the status and details of this error; sends nothing to a client that has disconnected."""
    # InternalError: a message could not be sent; the client is disconnecting, before the context reports it.
    if context.cancelled() or context.done() or isinstance(exc, grpc.aio.InternalError):
        raise asyncio.CancelledError from exc
    status = rpc_status.to_status(status_of(exc))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")


class StreamTurns:
    """The streams with new output, in the order in which they got it."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[asyncio.Event, None] = OrderedDict()
        self._num_woken = 0
        """Streams that were woken since the last turn, or in it."""
        self._has_turn = False

    def request(self, wake: asyncio.Event) -> None:
        """Set `wake` when its turn comes: at once if few others do; an event that waits already keeps its place."""
        if self._waiting or self._num_woken >= AT_ONCE:
            self._waiting[wake] = None
        elif not wake.is_set():
            wake.set()
            self._num_woken += 1
        if not self._has_turn:
            self._has_turn = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def withdraw(self, wake: asyncio.Event) -> None:
        """Forget an event."""
        self._waiting.pop(wake, None)

    def _take_turn(self) -> None:
        self._num_woken = min(AT_ONCE, len(self._waiting))
        for _ in range(self._num_woken):
            wake, _ = self._waiting.popitem(last=False)
            wake.set()
        self._has_turn = self._num_woken > 0
        if self._has_turn:
            asyncio.get_running_loop().call_soon(self._take_turn)
