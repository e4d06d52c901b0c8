"""The driver of a Session stream, on a stream that a test writes: what it sends, hands over and sends again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import pytest

from cadenza.calls.reconnect import Attempts
from cadenza.calls.session import DrivenRequest, SessionDriver, abort_quietly
from cadenza.errors import CadenzaError, DamagedStreamError, InvalidRequestError, UnavailableError
from cadenza.v1 import generation_pb2 as pb
from tests.helpers.client.scripted_server import until

Answer = Callable[[pb.SessionRequest], Iterable[Any]]


class Stub:
    """Streams that answer what is written to them; an answer that is an error ends its stream."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.written: list[list[str]] = []
        """For each stream what was written."""
        self.aborted: list[str] = []

    def Session(self) -> Stream:
        self.written.append([])
        return Stream(self)

    async def Abort(self, request: pb.AbortRequest) -> None:
        self.aborted.append(request.request_id)


class Stream:
    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._log = stub.written[-1]
        self._messages: asyncio.Queue[Any] = asyncio.Queue()

    async def read(self) -> Any:
        message = await self._messages.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def write(self, message: pb.SessionRequest) -> None:
        kind = "resume" if message.generate.HasField("resume") else message.WhichOneof("action")
        self._log.append(f"{kind} {message.generate.request_id or message.abort.request_id}")
        for each in self._stub.answer(message):
            self._messages.put_nowait(each)

    async def done_writing(self) -> None:
        self._log.append("half-close")
        self._messages.put_nowait(grpc.aio.EOF)

    def cancel(self) -> None:
        pass


class Noted(DrivenRequest):
    """Keeps what it is given."""

    def __init__(self, request_id: str, attempts: Attempts | None = None) -> None:
        super().__init__(pb.GenerateRequest(request_id=request_id), attempts)
        self.token_ids: list[int] = []
        self.times_s: list[float] = []
        self.ended: asyncio.Future[CadenzaError | None] = asyncio.get_running_loop().create_future()

    def sending(self, now_s: float) -> None:
        self.times_s.append(now_s)

    def take(self, response: pb.GenerateResponse, now_s: float) -> bool:
        self.token_ids += [token for output in response.outputs for token in output.token_ids]
        self.times_s.append(now_s)
        return True

    def end(self, error: CadenzaError | None) -> None:
        self.ended.set_result(error)

    def begin_anew(self) -> bool:
        self.token_ids.clear()
        return True


def attempts(timeout_s: float = 30.0) -> Attempts:
    return Attempts(timeout_s, lambda: True)


def message(*events: pb.SessionEvent) -> pb.SessionResponse:
    return pb.SessionResponse(events=events)


def output(request_id: str, index: int, *, last: bool = False) -> pb.SessionEvent:
    response = pb.GenerateResponse(outputs=[pb.SampleOutput(first_token_index=index, token_ids=[10 + index])])
    if last:
        response.stats.num_completion_tokens = index + 1
    return pb.SessionEvent(request_id=request_id, response=response, done=last)


def failure(request_id: str, code: grpc.StatusCode) -> pb.SessionEvent:
    event = pb.SessionEvent(request_id=request_id, done=True)
    event.error.code = code.value[0]
    return event


def lost(code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="gone")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cadenza.calls.reconnect.random.uniform", lambda low, high: 0.0)


async def test_requests_end_and_then_the_stream() -> None:
    """Each message has one time of arrival, for all its requests, which the driver's clock says."""
    ticks = iter(range(100))

    def answer(written: pb.SessionRequest) -> Iterable[Any]:
        return [message(output("a", 0), output("b", 0, last=True)), message(output("a", 1, last=True))][
            : 2 * (written.generate.request_id == "b")
        ]

    stub: Any = Stub(answer)
    driver = SessionDriver(stub, "server", clock=lambda: float(next(ticks)))
    a, b = Noted("a"), Noted("b")
    for live in (a, b):
        driver.send(live)
    async with asyncio.timeout(10):
        await driver.finish()
    assert (a.token_ids, b.token_ids) == ([10, 11], [10])
    assert (await a.ended, await b.ended) == (None, None)
    assert a.times_s[1] == b.times_s[1]
    assert stub.written == [["generate a", "generate b", "half-close"]]


async def test_without_attempts_a_loss_ends_requests_with_what_grpc_said_and_the_next_opens_another_stream() -> None:
    stub: Any = Stub(
        lambda written: [lost() if written.generate.request_id == "a" else message(output("b", 0, last=True))]
    )
    driver = SessionDriver(stub, "server")
    a = Noted("a")
    driver.send(a)
    error = await a.ended
    assert isinstance(error, UnavailableError)
    assert isinstance(error.__cause__, grpc.aio.AioRpcError)
    assert error.__cause__.details() == "gone"
    assert driver.ended_by is error
    b = Noted("b")
    driver.send(b)
    assert await b.ended is None
    await driver.close()
    assert stub.written == [["generate a"], ["generate b"]]


async def test_after_a_loss_the_rest_comes_on_another_stream() -> None:
    def answer(written: pb.SessionRequest) -> Iterable[Any]:
        if not written.generate.HasField("resume"):
            return [message(output("a", 0)), lost()]
        (position,) = written.generate.resume.positions
        return [message(output("a", position.token_index, last=True))]

    stub: Any = Stub(answer)
    driver = SessionDriver(stub, "server")
    live = Noted("a", attempts())
    driver.send(live)
    assert await live.ended is None
    assert live.token_ids == [10, 11]
    await driver.close()


@pytest.mark.parametrize(("accepts", "num_kills"), [(True, 10), (False, 4)])
async def test_a_server_that_has_accepted_a_request_is_at_work(accepts: bool, num_kills: int) -> None:
    """A scheduler is killed every 10 s, each time before the first token of a request that it has accepted again. One
    that says nothing is given up after 30 s."""
    now_s, kept = 0.0, Attempts(30.0, lambda: True, clock=lambda: now_s)

    def answer(written: pb.SessionRequest) -> Iterable[Any]:
        nonlocal now_s
        request = written.generate
        assert (request.starts_at_once, request.HasField("resume")) == (len(stub.written) > 1, False)
        if len(stub.written) > 10:
            return [message(output("a", 0, last=True))]
        now_s += 10.0
        accepted = pb.SessionEvent(request_id="a", response=pb.GenerateResponse(info=pb.RequestInfo(seed=1)))
        return [message(accepted), lost()] if accepts and request.starts_at_once else [lost()]

    stub: Any = Stub(answer)
    driver = SessionDriver(stub, "server")
    live = Noted("a", kept)
    driver.send(live)
    async with asyncio.timeout(10):
        error = await live.ended
    await driver.close()
    assert (error is None, live.token_ids) == ((True, [10]) if accepts else (False, []))
    assert len(stub.written) == num_kills + accepts


async def test_a_wait_for_one_stream_does_not_send_on_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was to be sent again later is sent once on the stream that replaces the first."""
    delays = iter([0.05])
    monkeypatch.setattr("cadenza.calls.reconnect.random.uniform", lambda low, high: next(delays, 0.0))

    def answer(written: pb.SessionRequest) -> Iterable[Any]:
        return [message(failure("a", grpc.StatusCode.UNAVAILABLE)), lost()] if len(stub.written) == 1 else []

    stub: Any = Stub(answer)
    driver = SessionDriver(stub, "server")
    driver.send(Noted("a", attempts()))
    await until(lambda: len(stub.written) == 2 and stub.written[1])
    await asyncio.sleep(0.1)
    await driver.close()
    assert stub.written == [["generate a"], ["generate a"]]


async def test_a_request_whose_output_is_always_damaged_ends_alone() -> None:
    def answer(written: pb.SessionRequest) -> Iterable[Any]:
        if written.generate.request_id == "good":
            return [message(output("good", 0))] if not written.generate.HasField("resume") else []
        return [message(output("bad", 5))]

    stub: Any = Stub(answer)
    driver = SessionDriver(stub, "server")
    good, bad = Noted("good", attempts()), Noted("bad", attempts())
    driver.send(good)
    driver.send(bad)
    async with asyncio.timeout(10):
        assert isinstance(await bad.ended, DamagedStreamError)
    assert len(stub.written) == 11
    assert good.token_ids == [10]
    assert list(driver.live) == ["good"]
    closed = InvalidRequestError("closed")
    await driver.close(closed)
    assert await good.ended is closed


async def test_what_the_server_has_forgotten_is_begun_anew() -> None:
    def answer(written: pb.SessionRequest) -> Iterable[Any]:
        if written.generate.HasField("resume"):
            return [message(failure("a", grpc.StatusCode.NOT_FOUND))]
        return [message(output("a", 0)), lost()] if len(stub.written) == 1 else [message(output("a", 0, last=True))]

    stub: Any = Stub(answer)
    driver = SessionDriver(stub, "server")
    live = Noted("a", attempts())
    driver.send(live)
    assert await live.ended is None
    assert live.token_ids == [10]
    assert stub.written == [["generate a"], ["resume a", "generate a"]]
    await driver.close()


async def test_an_abort_is_written_once_and_what_still_comes_is_nobodys() -> None:
    unknown: list[str] = []
    stub: Any = Stub(lambda written: [message(output("a", 0))])
    driver = SessionDriver(stub, "server", on_unknown=unknown.append)
    live, unsent = Noted("a"), Noted("b")
    driver.send(live)
    await until(lambda: live.token_ids)
    driver.send(unsent)
    driver.abort(unsent)
    driver.abort(live)
    driver.abort(live)
    async with asyncio.timeout(10):
        await driver.finish()
    assert stub.written == [["generate a", "abort a", "half-close"]]
    assert unknown == ["a"]
    assert not live.ended.done()


async def test_many_are_aborted_over_a_stream_of_their_own_and_one_by_a_call() -> None:
    stub: Any = Stub(lambda written: [])
    async with asyncio.timeout(10):
        await abort_quietly(stub, ["a", "b"])
        await abort_quietly(stub, ["c"])
    assert stub.written == [["abort a", "abort b", "half-close"]]
    assert stub.aborted == ["c"]


async def test_the_server_reads_aborts_before_the_stream_ends() -> None:
    """Or what was aborted would run on for its grace, as after a lost stream."""
    stub: Any = Stub(lambda written: [])
    driver = SessionDriver(stub, "server")
    live = Noted("a", attempts())
    driver.send(live)
    await until(lambda: stub.written == [["generate a"]])
    driver.abort(live)
    await driver.close()
    assert stub.written == [["generate a", "abort a", "half-close"]]


async def test_a_server_that_reads_no_aborts_holds_up_a_close_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cadenza.calls.session._ABORT_TIMEOUT_S", 0.05)
    stub: Any = Stub(lambda written: [])
    monkeypatch.setattr(Stream, "done_writing", lambda _: asyncio.Event().wait())
    driver = SessionDriver(stub, "server")
    live = Noted("a", attempts())
    driver.send(live)
    await until(lambda: stub.written == [["generate a"]])
    driver.abort(live)
    async with asyncio.timeout(10):
        await driver.close()
