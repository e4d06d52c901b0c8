"""How often and how long a client tries again, in virtual time, and which errors it takes for a lost connection."""

from __future__ import annotations

import random

import grpc
import pytest

from cadenza import LLM, AsyncClient, Client
from cadenza.calls.reconnect import Attempts, grace_s, is_lost_connection, whole_message
from cadenza.errors import DamagedStreamError, UnavailableError
from cadenza.v1 import generation_pb2 as pb
from cadenza_common.wire.transport import make_status

LOST = UnavailableError("lost")


class Tries:
    """Attempts on a clock that only their own waits move."""

    def __init__(self, timeout_s: float) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self.keeps_trying = True
        self.attempts = Attempts(timeout_s, lambda: self.keeps_trying, clock=lambda: self.now, sleep=self._sleep)

    async def _sleep(self, delay_s: float) -> None:
        self.waits.append(delay_s)
        self.now += delay_s

    async def until_error(self) -> None:
        with pytest.raises(UnavailableError) as caught:
            await self._for_ever()
        assert caught.value is LOST

    async def _for_ever(self) -> None:
        while True:
            await self.attempts.wait(LOST)


@pytest.mark.parametrize("seed", range(20))
async def test_waits_grow_with_jitter_until_the_time_is_over(seed: int) -> None:
    random.seed(seed)
    tries = Tries(30.0)
    await tries.until_error()
    assert tries.now == pytest.approx(30.0), "the last attempt is made when the time is just over"
    limits = [min(2.0, 0.05 * 2**number) for number in range(len(tries.waits))]
    assert all(0 <= wait <= limit for wait, limit in zip(tries.waits, limits, strict=True))
    assert len({round(wait, 6) for wait in tries.waits}) == len(tries.waits), "no two clients come at once"
    assert 15 < len(tries.waits) < 80


async def test_the_time_starts_anew_with_each_response() -> None:
    tries = Tries(5.0)
    for _ in range(50):
        await tries.attempts.wait(LOST)
        tries.now += 4.0
        tries.attempts.on_response()
    tries.waits.clear()
    began = tries.now
    await tries.until_error()
    assert tries.now == pytest.approx(began + 5.0)
    assert tries.waits[0] <= 0.05, "and so do the waits"


async def test_without_a_point_or_time_the_error_comes_at_once() -> None:
    tries = Tries(0.0)
    await tries.until_error()
    tries = Tries(30.0)
    tries.keeps_trying = False
    await tries.until_error()
    assert not tries.waits


async def test_a_client_that_is_closed_while_it_waits_does_not_try_again() -> None:
    tries = Tries(30.0)

    async def close(delay_s: float) -> None:
        tries.keeps_trying = False

    tries.attempts._sleep = close
    with pytest.raises(UnavailableError):
        await tries.attempts.wait(LOST)


async def test_a_request_is_taken_back_after_a_reconnection_and_not_for_ever() -> None:
    tries = Tries(30.0)
    assert not tries.attempts.takes_back(grpc.StatusCode.ABORTED), "another client has it"
    await tries.attempts.wait(LOST)
    assert not tries.attempts.takes_back(grpc.StatusCode.NOT_FOUND)
    assert [tries.attempts.takes_back(grpc.StatusCode.ABORTED) for _ in range(4)] == [True, True, True, False]


def error(code: grpc.StatusCode, details: str = "", *, from_server: bool = False) -> grpc.aio.AioRpcError:
    trailers = grpc.aio.Metadata()
    if from_server:
        trailers.add("grpc-status-details-bin", make_status(code, details).SerializeToString())
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details)


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        (error(grpc.StatusCode.UNAVAILABLE, "Socket closed"), True),
        (error(grpc.StatusCode.UNAVAILABLE, "the service is stopping", from_server=True), True),
        (error(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"), True),
        (error(grpc.StatusCode.CANCELLED, "Received RST_STREAM with error code 8"), True),
        (error(grpc.StatusCode.UNKNOWN, "Stream removed"), True),
        (error(grpc.StatusCode.INTERNAL, "ValueError: a bug", from_server=True), False),
        (error(grpc.StatusCode.CANCELLED, "aborted before it began", from_server=True), False),
        (error(grpc.StatusCode.UNKNOWN, "Unexpected <class 'ValueError'>"), False),
        (error(grpc.StatusCode.INVALID_ARGUMENT, "prompt: is empty", from_server=True), False),
        (error(grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"), False),
        (error(grpc.StatusCode.DATA_LOSS, "lost", from_server=True), False),
    ],
)
def test_which_errors_are_a_lost_connection(lost: grpc.aio.AioRpcError, expected: bool) -> None:
    assert is_lost_connection(lost) is expected


async def test_a_damaged_stream_is_begun_again_ten_times() -> None:
    tries = Tries(1e9)
    damage = DamagedStreamError("lost")
    for _ in range(10):
        tries.attempts.on_damage()
        await tries.attempts.wait(damage)
        tries.attempts.on_response()
    tries.attempts.on_damage()
    with pytest.raises(DamagedStreamError):
        await tries.attempts.wait(damage)


def test_what_grpc_gives_for_a_message_that_is_none() -> None:
    """None if it cannot be parsed, EOF at the end."""
    message = pb.GenerateResponse()
    assert whole_message(message, pb.GenerateResponse, "ended") is message
    with pytest.raises(DamagedStreamError, match="a message cannot be read"):
        whole_message(None, pb.GenerateResponse, "ended")
    with pytest.raises(UnavailableError, match=r"^ended$"):
        whole_message(grpc.aio.EOF, pb.GenerateResponse, "ended")


def test_the_grace_outlasts_the_attempts_and_is_one_that_servers_take() -> None:
    assert grace_s(30.0) == 60.0
    assert grace_s(0.0) == 0.0
    assert grace_s(float("inf")) == 3600.0


@pytest.mark.parametrize("value", [-1, float("nan"), "5", None, True])
def test_wrong_timeouts(value: object) -> None:
    for make in (AsyncClient, Client):
        with pytest.raises(ValueError, match="reconnect_timeout_s must be 0 or more seconds, not"):
            make("127.0.0.1:1", reconnect_timeout_s=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reconnect_timeout_s must be 0 or more seconds, not"):
        LLM("nowhere", reconnect_timeout_s=value)  # type: ignore[arg-type]
