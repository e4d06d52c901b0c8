"""One request's retries do not use up another's; a change that was perhaps carried out is looked at."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import grpc
import pytest

from cadenza.calls.output_collector import OutputCollector
from cadenza.errors import AlreadyExistsError, CadenzaError, InvalidRequestError, UnavailableError
from cadenza.prompts import Prompt
from cadenza.v1 import admin_pb2
from cadenza.v1 import generation_pb2 as pb
from gateway_svc.scheduler.caller import SchedulerCaller
from gateway_svc.scheduler.calls import Calls
from gateway_svc.scheduler.inbox import Inbox
from gateway_svc.scheduler.session import GatewaySession, PromptRun


class Stream:
    """A stream that answers what is written to it."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.messages: asyncio.Queue[Any] = asyncio.Queue()

    async def read(self):
        message = await self.messages.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def write(self, message: pb.SessionRequest) -> None:
        for each in self.answer(message):
            self.messages.put_nowait(each)

    async def done_writing(self) -> None:
        self.messages.put_nowait(grpc.aio.EOF)

    def cancel(self) -> None:
        pass


def session_of(answer, timeout_s: float = 30.0) -> GatewaySession:
    stub: Any = type("Stub", (), {"Session": lambda _: Stream(answer)})()
    return GatewaySession(
        stub, "target", timeout_s, was_reached=lambda: True, on_response=lambda: None, on_loss=lambda: None
    )


def started(session: GatewaySession, request_id: str) -> PromptRun:
    collector = OutputCollector(request_id, Prompt(token_ids=[1]))
    live = PromptRun(pb.GenerateRequest(request_id=request_id), collector, Inbox(1), 0, is_streamed=True)
    session.start(live)
    return live


def failing(request_id: str, code: grpc.StatusCode) -> pb.SessionResponse:
    event = pb.SessionEvent(request_id=request_id)
    event.error.code = code.value[0]
    return pb.SessionResponse(events=[event])


def token(request_id: str, index: int = 0) -> pb.SessionResponse:
    output = pb.SampleOutput(first_token_index=index, token_ids=[7])
    response = pb.GenerateResponse(request_id=request_id, outputs=[output])
    return pb.SessionResponse(events=[pb.SessionEvent(request_id=request_id, response=response)])


async def test_takeovers_of_one_request_are_not_those_of_another(monkeypatch):
    """Each may be taken back three times after a lost connection, however many there are."""
    monkeypatch.setattr("cadenza.calls.reconnect.random.uniform", lambda low, high: 0.0)
    counts: dict[str, int] = {}
    aborted = []

    def answer(message):
        if message.HasField("abort"):
            aborted.append(message.abort.request_id)
            return []
        request_id = message.generate.request_id
        counts[request_id] = counts.get(request_id, 0) + 1
        if counts[request_id] == 1:
            return [] if request_id != "d" else [UnavailableError("the connection is lost")]
        return [token(request_id) if counts[request_id] == 5 else failing(request_id, grpc.StatusCode.ABORTED)]

    session = session_of(answer)
    lives = [started(session, request_id) for request_id in "abcd"]
    async with asyncio.timeout(10):
        for live in lives:
            assert await live.inbox.take() is not None
    await session.close()
    assert counts == dict.fromkeys("abcd", 5)
    assert aborted == [*"abcd"], "what runs when a session is closed does not run on for its grace"


async def test_a_request_that_is_always_unavailable_ends_beside_others_that_run(monkeypatch):
    monkeypatch.setattr("cadenza.calls.reconnect.random.uniform", lambda low, high: 0.0)

    indexes = itertools.count()

    def answer(message):
        request_id = message.generate.request_id
        running = token("good", next(indexes))
        return [running] if request_id == "good" else [failing(request_id, grpc.StatusCode.UNAVAILABLE), running]

    session = session_of(answer, timeout_s=0.05)
    good, bad = started(session, "good"), started(session, "bad")
    async with asyncio.timeout(10):
        with pytest.raises(UnavailableError):
            await bad.inbox.take()
    assert await good.inbox.take() is not None
    assert good.inbox.error is None
    await session.close()


async def test_a_request_that_was_ended_is_not_sent_again_after_a_lost_connection(monkeypatch):
    monkeypatch.setattr("cadenza.calls.reconnect.random.uniform", lambda low, high: 0.0)
    written = []

    def answer(message):
        written.append(message)
        return [token("a")] if message.HasField("generate") else [UnavailableError("the connection is lost")]

    session = session_of(answer)
    live = started(session, "a")
    async with asyncio.timeout(10):
        assert await live.inbox.take() is not None
        session.end(live, InvalidRequestError("ended"))
        with pytest.raises(InvalidRequestError, match="ended"):
            await live.inbox.take()
    assert [message.WhichOneof("action") for message in written] == ["generate", "abort"]
    assert live.collector.result().outputs[0].token_ids == [7]
    unsent = started(session, "b")
    session.end(unsent, InvalidRequestError("ended"))
    with pytest.raises(InvalidRequestError, match="ended"):
        await unsent.inbox.take()
    await session.close()


class Lost(grpc.aio.AioRpcError):
    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="")


@pytest.mark.parametrize(
    ("there", "errors", "expected"),
    [
        ([("a", "/x/one", b"h")], ["UNAVAILABLE", "ALREADY_EXISTS"], None),
        ([("a", "/x/two", b"h")], ["UNAVAILABLE", "ALREADY_EXISTS"], AlreadyExistsError),
        ([("a", "/x/one", b"h")], ["ALREADY_EXISTS"], AlreadyExistsError),
        ([("a", "/x/one", b""), ("a", "/x/one", b"h")], ["UNAVAILABLE", "ALREADY_EXISTS"], None),
        ([("a", "/x/one", b""), None], ["UNAVAILABLE", "ALREADY_EXISTS", "INVALID_ARGUMENT"], InvalidRequestError),
    ],
    ids=["this one", "another one", "not tried before", "loads", "fails"],
)
async def test_a_load_that_is_tried_again_looks_at_what_is_loaded(monkeypatch, there, errors, expected):
    """there: the adapter of that name at each look."""
    monkeypatch.setattr("cadenza.calls.reconnect.random.uniform", lambda low, high: 0.0)
    monkeypatch.setattr("gateway_svc.scheduler.caller._POLL_S", 0.0)
    calls = Calls("127.0.0.1:9", None, 30.0, lambda: True)
    calls.was_reached = True
    async with grpc.aio.insecure_channel("127.0.0.1:9") as channel:
        nothing = lambda: None  # noqa: E731
        caller = SchedulerCaller(channel, "t", None, timeout_s=30.0, calls=calls, on_response=nothing, on_loss=nothing)

        class Admin:
            async def LoadAdapter(self, request):
                if errors:
                    raise Lost(grpc.StatusCode[errors.pop(0)])

            async def ListAdapters(self, request, timeout):
                found = there.pop(0)
                infos = (
                    []
                    if found is None
                    else [admin_pb2.AdapterInfo(name=found[0], path=found[1], content_hash=found[2])]
                )
                return admin_pb2.ListAdaptersResponse(adapters=infos)

        caller._admin = Admin()
        result: CadenzaError | None = None
        try:
            await caller.load_adapter("a", "/x//one/")
        except CadenzaError as error:
            result = error
    assert type(result) is (expected or type(None))
    assert not errors
