"""Floods of streams, small: `python -m tests.fuzz.wire.floods` has the figures of 10,000 streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from cadenza.v1 import execution_pb2 as pb
from executor_svc.service.servicer import ExecutionServicer
from executor_svc.worker.step import StepExecutor
from executor_svc.worker.worker import Worker
from tests.fuzz.wire.floods import FLOODS, flooded_executor, flooded_scheduler, half_open_plans
from tests.fuzz.wire.processes import FuzzedService
from tests.helpers.executor.executor_harness import fake_description
from tests.helpers.scheduler.fake_executor import LIMITS, CountingRunner, RecordingPools

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NUM_STREAMS = 1000
MAX_BYTES_PER_STREAM = 1_000_000
MAX_NORMAL_S = 20.0


@pytest.fixture(scope="module")
def service() -> Iterator[FuzzedService]:
    with flooded_scheduler() as service:
        yield service


@pytest.mark.parametrize(("flood", "num_streams"), [(name, 60 if "read" in name else NUM_STREAMS) for name in FLOODS])
def test_a_flooded_scheduler_serves_a_normal_request(service: FuzzedService, flood: str, num_streams: int) -> None:
    """Its memory stays bounded, and what it refuses it refuses cleanly."""
    figures = asyncio.run(FLOODS[flood](service, num_streams))
    assert figures.normal_s < MAX_NORMAL_S, figures
    assert figures.bytes_per_stream < MAX_BYTES_PER_STREAM, figures
    assert figures.statuses.keys() <= {"OK", "RESOURCE_EXHAUSTED"}, figures
    if flood == "requests at once":
        assert figures.statuses["OK"] > 0


def test_half_open_plan_streams_end_by_themselves() -> None:
    with flooded_executor() as service:
        figures = asyncio.run(half_open_plans(service, NUM_STREAMS))
        assert figures.statuses == {"UNAVAILABLE": NUM_STREAMS}
        assert figures.bytes_per_stream < MAX_BYTES_PER_STREAM, figures


class Unread:
    """The context of a stream whose scheduler reads the opening and no result."""

    def __init__(self) -> None:
        self.aborted: tuple[grpc.StatusCode, str] | None = None

    async def write(self, message: pb.ExecuteResponse) -> None:
        if not message.HasField("opened"):
            await asyncio.Event().wait()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def abort(self, code: grpc.StatusCode, message: str, _trailing: object = ()) -> None:
        self.aborted = code, message


async def test_a_scheduler_that_sends_plans_and_never_reads_loses_its_session() -> None:
    """Every plan has an answer, also those over max_inflight_plans: they must not pile up."""
    worker, context, num_sent = Worker(lambda: StepExecutor(CountingRunner(), RecordingPools(), LIMITS)), Unread(), 0

    async def requests() -> AsyncIterator[bytes]:
        nonlocal num_sent
        yield pb.ExecuteRequest(open=pb.OpenSession(scheduler_id="A", epoch=1, protocol_version=1)).SerializeToString()
        while True:
            num_sent += 1
            yield pb.ExecuteRequest(plan=pb.StepPlan(step_id=num_sent, epoch=1)).SerializeToString()
            await asyncio.sleep(0)

    worker.start()
    await asyncio.wrap_future(worker.ready)
    servicer = ExecutionServicer(worker, fake_description(), heartbeat_s=60, silence_s=60)
    try:
        async with asyncio.timeout(30):
            await servicer.Execute(requests(), context)
    finally:
        assert await asyncio.to_thread(worker.stop, 20)
    assert context.aborted == (
        grpc.StatusCode.RESOURCE_EXHAUSTED, "over 64 plans or results wait: the scheduler does not read"
    )  # fmt: skip
    assert 60 < num_sent < 70
