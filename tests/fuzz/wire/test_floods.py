"""Floods of streams, small: `python -m tests.fuzz.wire.floods` has the figures of 10,000 streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from cadenza.v1 import execution_pb2 as pb
from tests.fuzz.wire.floods import FLOODS, flooded_executor, flooded_scheduler, half_open_plans
from tests.fuzz.wire.processes import FuzzedService
from tests.helpers.executor_harness import Stream, fake_executor

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


async def test_a_scheduler_that_sends_plans_and_never_reads_loses_its_session() -> None:
    """Every plan has an answer, also those over max_inflight_plans: they must not pile up."""
    async with fake_executor() as harness:
        stream = await harness.open(1)
        sending = asyncio.create_task(_send_for_ever(stream))
        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            await asyncio.wait_for(sending, 30)
        await harness.open(2, scheduler_id="B")


async def _send_for_ever(stream: Stream) -> None:
    plan = {"released_slots": [2**32 - 1] * 100, "admitted": [pb.AdmittedSequence(slot=2**32 - 1)]}
    while True:
        await stream.plan(1, **plan)
