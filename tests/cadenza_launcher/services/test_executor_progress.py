"""What the supervisor learns from the scheduler about an executor that died."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from cadenza.v1 import generation_pb2, generation_pb2_grpc
from cadenza_launcher.services.supervision import ExecutorProgress

EXECUTOR = "host:1"


class FakeScheduler(generation_pb2_grpc.GenerationServiceServicer):
    """Reports an executor as the test sets it, after another one that has completed steps."""

    def __init__(self) -> None:
        self.executors: list[generation_pb2.ExecutorInfo] = []

    def GetServerInfo(self, request, context):
        return generation_pb2.GetServerInfoResponse(executors=self.executors)

    def report(self, incarnation: int, last_step_id: int) -> None:
        other = generation_pb2.ExecutorInfo(target="other:1", incarnation=99, last_step_id=99)
        own = generation_pb2.ExecutorInfo(target=EXECUTOR, incarnation=incarnation, last_step_id=last_step_id)
        self.executors = [other, own]


@pytest.fixture
def scheduler() -> Iterator[tuple[FakeScheduler, ExecutorProgress]]:
    server, fake = grpc.server(ThreadPoolExecutor(1)), FakeScheduler()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield fake, ExecutorProgress(lambda: f"127.0.0.1:{port}", lambda: EXECUTOR)
    server.stop(None).wait()


def test_an_incarnation_counts_once_and_only_with_a_completed_step(scheduler):
    fake, progress = scheduler
    assert not progress.completed_step(), "no executor yet"
    fake.report(incarnation=11, last_step_id=0)
    assert not progress.completed_step()
    fake.report(incarnation=11, last_step_id=5)
    assert progress.completed_step()
    assert not progress.completed_step(), "the next process died before the scheduler had a session with it"
    fake.report(incarnation=12, last_step_id=0)
    assert not progress.completed_step()
    fake.report(incarnation=12, last_step_id=6)
    assert progress.completed_step()


def test_a_scheduler_that_is_gone_knows_of_no_step():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        assert not ExecutorProgress(lambda: address, lambda: EXECUTOR).completed_step()
