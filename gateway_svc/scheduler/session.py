"""One long-lived Session stream for the requests of many HTTP clients; a lost one is replaced, and nobody notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cadenza.calls.output_collector import OutputCollector
from cadenza.calls.reconnect import Attempts
from cadenza.calls.session import DrivenRequest, SessionDriver
from cadenza.errors import CadenzaError, PermissionDeniedError, UnauthenticatedError, UnavailableError
from cadenza.v1 import generation_pb2
from gateway_svc.scheduler.inbox import Inbox

if TYPE_CHECKING:
    from cadenza.v1.generation_pb2_grpc import GenerationServiceAsyncStub

_EVENTS_AT_ONCE = 256
"""Events of a message that are taken before other tasks run: 4 ms at some 15 us each."""


class PromptRun(DrivenRequest):
    """One prompt that runs."""

    __slots__ = ("_index", "_is_streamed", "_run_alone", "collector", "inbox")

    def __init__(
        self,
        request: generation_pb2.GenerateRequest,
        collector: OutputCollector,
        inbox: Inbox,
        index: int,
        *,
        tenant: bytes = b"",
        is_streamed: bool,
        run_alone: Callable[[PromptRun], None] | None = None,
    ) -> None:
        """index: of the prompt in its HTTP request. is_streamed: whether the inbox gets the deltas; otherwise the
        client has seen nothing before the end. run_alone: runs it in a session of its own key, for when this one may
        not name its tenant."""
        super().__init__(request, tenant=tenant)
        self.collector = collector
        self.inbox = inbox
        self._index = index
        self._is_streamed = is_streamed
        self._run_alone = run_alone

    def take(self, response: generation_pb2.GenerateResponse, now_s: float) -> bool:
        """See DrivenRequest."""
        delta = self.collector.add(response)
        if not self._is_streamed:
            return True
        self.inbox.put(self._index, delta)
        return self.inbox.error is None

    def end(self, error: CadenzaError | None) -> None:
        """See DrivenRequest; one that this session may not name runs in that of its own key."""
        run_alone, self._run_alone = self._run_alone, None
        if error is None:
            self.inbox.end()
        elif run_alone is None or self.ended_by is not None or not _may_be_naming(error):
            self.inbox.fail(error)
        else:
            self.tenant, self.is_sent = b"", False
            run_alone(self)

    def begin_anew(self) -> bool:
        """See DrivenRequest."""
        if not self._is_streamed:
            self.collector.clear()
        return not self._is_streamed


class GatewaySession(SessionDriver):
    """Runs requests until `close`.

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
        super().__init__(stub, target, on_loss=on_loss)
        self._timeout_s = timeout_s
        self._was_reached = was_reached
        self._on_response = on_response

    def start(self, run: PromptRun) -> None:
        """Send a request, with attempts of its own: how long it is tried does not depend on others."""
        run.attempts = Attempts(self._timeout_s, self._was_reached, self._on_response)
        self.send(run)

    def end_all(self) -> None:
        """Abort what runs; whoever waits for it gets UnavailableError."""
        for run in list(self.live.values()):
            self.abort(run)
            run.end(_stopping())

    async def close(self, error: CadenzaError | None = None) -> None:
        """Abort what runs, with UnavailableError for whoever waits for it, and end the stream."""
        self.end_all()
        await super().close(error or _stopping())

    async def take_all(self, events: Sequence[generation_pb2.SessionEvent], now_s: float) -> None:
        """Take the events of requests that have had none, and then those of all others.

        Who waits for a first token is served before the streams that go on: of 64, each takes some 70 us.
        """
        first: list[generation_pb2.SessionEvent] = []
        later: list[generation_pb2.SessionEvent] = []
        for event in events:
            run = self.live.get(event.request_id)
            (later if run is None or run.positions.has_responses else first).append(event)
        for part in (first, later):
            for number, event in enumerate(part, start=1):
                self.take(event, now_s)
                if number % _EVENTS_AT_ONCE == 0 or (part is first and number == len(first)):
                    await asyncio.sleep(0)  # answers are written


def _stopping() -> UnavailableError:
    return UnavailableError("the gateway is stopping")


def _may_be_naming(error: CadenzaError) -> bool:
    """Whether a session may have been refused for the tenant that it named: it has lost the right, or its own token.

    An unknown token may be the gateway's or the client's: the client's own session finds out.
    """
    if isinstance(error, PermissionDeniedError):
        return "may_name_tenants" in error.message
    return isinstance(error, UnauthenticatedError)
