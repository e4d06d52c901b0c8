"""A short run of the wire's fuzz on each service; `python -m tests.fuzz.wire` runs for as long as one likes."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from google.rpc import code_pb2

from cadenza.v1 import generation_pb2 as pb
from tests.fuzz.wire import fuzz_executor, fuzz_scheduler
from tests.fuzz.wire.calls import send
from tests.fuzz.wire.floods import flooded_executor, flooded_scheduler
from tests.fuzz.wire.processes import FuzzedService
from tests.fuzz.wire.run import fuzz

MAX_GROWN_BYTES = 30_000_000


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("service", "num_examples", "wanted"),
    [
        ("scheduler", 80, {"OK", "INVALID_ARGUMENT"}),
        ("simulated", 60, {"OK", "INVALID_ARGUMENT", "STEP_STATUS_OK", "STEP_STATUS_INVALID_PLAN"}),
        ("cpu", 50, {"OK", "INVALID_ARGUMENT", "STEP_STATUS_OK", "STEP_STATUS_INVALID_PLAN"}),
    ],
)
def test_anything_on_the_wire_ends_cleanly(service: str, num_examples: int, wanted: set[str]) -> None:
    """And the next normal request or plan gives what it gave before."""
    report = fuzz(service, num_examples, seed_=7)
    assert report.num_examples == num_examples
    # Else the run proves little.
    assert wanted <= report.statuses.keys(), report.statuses
    assert report.grown_bytes < MAX_GROWN_BYTES


@pytest.fixture(scope="module")
def services() -> Iterator[tuple[FuzzedService, FuzzedService]]:
    """An executor and a scheduler."""
    with flooded_executor() as executor, flooded_scheduler() as scheduler:
        yield executor, scheduler


@pytest.mark.slow
@pytest.mark.parametrize(
    "payload", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0b" * 200], ids=["tag", "length", "groups"]
)
def test_bytes_that_are_no_message_are_refused_by_every_call(
    services: tuple[FuzzedService, FuzzedService], payload: bytes
) -> None:
    """By its own status, and not by gRPC's UNKNOWN, which would log a stack."""
    executor, scheduler = services
    for method in fuzz_executor.METHODS:
        assert send(executor.channel, method, [payload]).status is grpc.StatusCode.INVALID_ARGUMENT, method.path
    executor.check()
    for method in fuzz_scheduler.METHODS:
        ended = send(scheduler.channel, method, [payload])
        if method.client_streams:
            (event,) = pb.SessionResponse.FromString(ended.answers[0]).events
            assert event.error.code == code_pb2.INVALID_ARGUMENT
        else:
            assert ended.status is grpc.StatusCode.INVALID_ARGUMENT, method.path
    scheduler.check()
