"""Schedulers that compete for one executor, over real gRPC: half-open streams, restarts, two that are alive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from scheduler_svc.executors.client import GrpcExecutor, GrpcPlanStream
from scheduler_svc.plan_loop.clock import SystemClock
from scheduler_svc.plan_loop.opening import open_session
from scheduler_svc.plan_loop.ports import (
    ExecutorFencedError,
    ExecutorHeldError,
    ExecutorLostError,
    PlanStream,
    StaleEpochError,
)
from tests.helpers.machine.relay import Relay, relay
from tests.helpers.services import executor_service

pytestmark = pytest.mark.timeout(30)


@asynccontextmanager
async def scheduler(target: str, scheduler_id: str) -> AsyncIterator[GrpcExecutor]:
    """The client of one scheduler process."""
    client = GrpcExecutor(target, scheduler_id)
    try:
        yield client
    finally:
        await client.aclose()


@asynccontextmanager
async def cut_off(scheduler_id: str) -> AsyncIterator[tuple[str, Relay, GrpcExecutor, GrpcPlanStream]]:
    """An executor whose holder was cut off just now; yields its address, the path and the holder with its session.

    Its connection stands, and nothing passes: as after a loss of power, or with a cable pulled.
    """
    async with (
        executor_service("simulated", simulate="instant") as address,
        relay(address) as path,
        scheduler(path.address, scheduler_id) as client,
    ):
        stream = await client.open(1)
        path.silent = True
        yield address, path, client, stream


async def opened(client: GrpcExecutor) -> tuple[PlanStream, int]:
    """Open a session as a plan loop that has just started; returns the session and its epoch."""
    return await open_session(client, SystemClock(), 1)


def lease_has_ended(caplog: pytest.LogCaptureFixture) -> bool:
    """Whether the executor has waited for a holder's lease to end, which takes 2 s."""
    return any("is silent for" in message for message in caplog.messages)


async def broken_by(stream: PlanStream) -> ExecutorLostError:
    with pytest.raises(ExecutorLostError) as caught:
        await anext(stream.results())
    return caught.value


async def fenced(client: GrpcExecutor, epoch: int) -> ExecutorFencedError:
    """The error that ends the openings of a client whose connection has to be made anew; 10 s at most."""
    async with asyncio.timeout(10):
        while True:
            try:
                await client.open(epoch)
                pytest.fail("the session was opened")
            except ExecutorFencedError as exc:
                return exc
            except ExecutorLostError:
                await asyncio.sleep(0.02)


async def test_a_restarted_scheduler_with_its_id_takes_a_half_open_session_over_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cut_off("A") as (address, path, former, stream), scheduler(address, "A") as restarted:
        new, epoch = await opened(restarted)
        assert not lease_has_ended(caplog)
        assert epoch == 2
        assert "no message for" in str(await broken_by(stream)), "the former process learns nothing of it"
        path.silent = False
        await stream.close()
        # It must not take the executor back from its successor, whatever epoch it opens.
        assert "a newer process of scheduler A has taken this executor over" in str(await fenced(former, 1_000))
        await new.close()


async def test_a_restarted_scheduler_with_another_id_gets_a_half_open_executor_after_the_lease(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cut_off("A") as (address, _, _, stream), scheduler(address, "B") as other:
        new, epoch = await opened(other)
        assert lease_has_ended(caplog)
        assert epoch == 2
        await asyncio.gather(new.close(), stream.close())


async def test_a_live_scheduler_that_is_replaced_by_its_restarted_self_stops(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        executor_service("simulated", simulate="instant") as address,
        scheduler(address, "A") as former,
        scheduler(address, "A") as restarted,
    ):
        stream = await former.open(1)
        new, _ = await opened(restarted)
        assert not lease_has_ended(caplog)
        error = await broken_by(stream)
        assert type(error) is ExecutorFencedError
        assert "another process of scheduler A, at ipv4:127.0.0.1:" in str(error)
        with pytest.raises(ExecutorFencedError, match="a newer process of scheduler A"):
            await former.open(1_000)
        await asyncio.gather(new.close(), stream.close())


async def test_a_second_live_scheduler_stops_and_says_by_whom() -> None:
    async with (
        executor_service("simulated", simulate="instant") as address,
        scheduler(address, "A") as first,
        scheduler(address, "B") as second,
    ):
        stream = await first.open(1)
        with pytest.raises(ExecutorHeldError) as held:
            await second.open(2)
        assert held.value.silent_s < 2.0
        began = time.monotonic()
        with pytest.raises(ExecutorFencedError, match=r"scheduler A at ipv4:127\.0\.0\.1:\d+ holds this executor"):
            await opened(second)
        assert time.monotonic() - began > 1.0
        with pytest.raises(StaleEpochError):  # the first one has lost nothing
            await first.open(1)
        await stream.close()


async def test_a_session_that_was_closed_leaves_the_executor_free_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        executor_service("simulated", simulate="instant") as address,
        scheduler(address, "A") as first,
        scheduler(address, "B") as second,
    ):
        await (await first.open(7)).close()
        stream, epoch = await opened(second)
        assert not lease_has_ended(caplog)
        assert epoch == 8
        await stream.close()
