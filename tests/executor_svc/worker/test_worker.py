"""The device thread: order, sessions, failures, stopping; without gRPC."""

from __future__ import annotations

import gzip
import json
import queue
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cadenza_common.plan.plan import AdmittedSequence, StepPlan
from cadenza_common.plan.result import StepResult, StepStatus
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.simulated.executor import SimulatedStepExecutor
from executor_svc.worker.session import PlanSession, RejectedPlan
from executor_svc.worker.step import StepExecutor
from executor_svc.worker.worker import Worker
from tests.helpers.scheduler.fake_executor import LIMITS, CountingRunner, RecordingPools


class Rig:
    """A worker, its fake, and the results in the order of their arrival."""

    def __init__(self) -> None:
        self.runner = CountingRunner()
        self.worker = Worker(lambda: StepExecutor(self.runner, RecordingPools(), LIMITS))
        self.worker.start()
        self.worker.ready.result(10)
        self.results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()

    def open(self, epoch: int) -> tuple[PlanSession, int]:
        session, opened = self.worker.open_session(epoch, self.results.put)
        return session, opened.result(10)

    def submit(self, session: PlanSession, step_id: int, **fields: Any) -> None:
        plan = StepPlan(**{"epoch": session.epoch} | fields, step_id=step_id)
        self.worker.submit(session, plan, time.monotonic_ns())

    def result(self) -> StepResult:
        return self.results.get(timeout=10)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.runner.gate.set()
    assert rig.worker.stop(10)


def one(slot: int, token: int) -> dict[str, Any]:
    sequence = AdmittedSequence(slot, np.array([token]), 1, 0, np.array([slot]), SequenceSampling())
    return {"admitted": (sequence,), "decode_ready": True}


def test_results_follow_plans(rig: Rig) -> None:
    session, last = rig.open(1)
    assert last == 0
    rig.submit(session, 3, **one(0, 5))
    rig.submit(session, 4, decode_ready=True)
    results = [rig.result(), rig.result()]
    assert [(r.step_id, r.status, r.token_ids.tolist()) for r in results] == [
        (3, StepStatus.OK, [6]),
        (4, StepStatus.OK, [7]),
    ]
    timings = results[1].timings
    assert min(timings.queue_ns, timings.device_ns, timings.sample_ns) > 0
    assert timings.total_ns >= timings.device_ns + timings.sample_ns
    assert rig.open(2)[1] == 4


def test_rejected_plans_are_answered_in_their_turn(rig: Rig) -> None:
    session, _ = rig.open(1)
    rig.submit(session, 1)
    rig.worker.submit(session, RejectedPlan(2, "unreadable"), time.monotonic_ns())
    rig.submit(session, 3)
    results = [rig.result() for _ in range(3)]
    assert [r.status for r in results] == [StepStatus.OK, StepStatus.INVALID_PLAN, StepStatus.SKIPPED]
    assert results[1].error_message == "unreadable"


def test_closed_sessions_get_and_run_nothing(rig: Rig) -> None:
    rig.runner.gate.clear()
    session, _ = rig.open(1)
    rig.submit(session, 1, **one(0, 5))
    rig.submit(session, 2, decode_ready=True)
    assert rig.runner.entered.acquire(timeout=10)
    activity = rig.worker.activity()
    assert (activity.step_id, activity.num_queued) == (1, 1)
    assert activity.age_ns > 0
    rig.worker.close_session(session)
    rig.submit(session, 3, decode_ready=True)
    assert rig.worker.activity().num_queued == 0
    rig.runner.gate.set()
    assert rig.open(2)[1] == 1
    assert rig.results.empty()
    assert len(rig.runner.batches) == 1
    assert rig.worker.activity().step_id == 0


def test_an_opening_overtakes_one_that_waits(rig: Rig) -> None:
    rig.runner.gate.clear()
    session, _ = rig.open(1)
    rig.submit(session, 1, **one(0, 5))
    assert rig.runner.entered.acquire(timeout=10)
    _, second = rig.worker.open_session(2, rig.results.put)
    third, opened = rig.worker.open_session(3, rig.results.put)
    rig.runner.gate.set()
    assert opened.result(10) == 1
    assert second.cancelled()
    rig.submit(third, 2, **one(0, 8))
    assert rig.result().token_ids.tolist() == [9]


def test_a_lost_device_is_reported(rig: Rig) -> None:
    session, _ = rig.open(1)
    rig.runner.errors.append(torch.AcceleratorError("an illegal memory access"))
    rig.submit(session, 1, **one(0, 5))
    assert rig.result().status == StepStatus.FAILED
    assert "illegal" in str(rig.worker.lost.result(10))


def test_stop_drops_plans_and_reports_a_step_that_does_not_end() -> None:
    rig = Rig()
    rig.runner.gate.clear()
    session, _ = rig.open(1)
    rig.submit(session, 1, **one(0, 5))
    rig.submit(session, 2, decode_ready=True)
    assert rig.runner.entered.acquire(timeout=10)
    assert not rig.worker.stop(0.01)
    rig.runner.gate.set()
    assert rig.worker.stop(10)
    assert len(rig.runner.batches) == 1


def test_a_failed_build_is_reported() -> None:
    def build() -> StepExecutor:
        raise RuntimeError("no such model")

    worker = Worker(build)
    worker.start()
    with pytest.raises(RuntimeError, match="no such model"):
        worker.ready.result(10)
    assert worker.stop(10)


def test_a_trace_of_the_next_steps(rig: Rig) -> None:
    session, _ = rig.open(1)
    rig.submit(session, 1, **one(0, 5))
    rig.result()
    traced = rig.worker.trace(2)
    with pytest.raises(RuntimeError, match="a trace is being recorded already"):
        rig.worker.trace(1)
    rig.submit(session, 2, decode_ready=True)
    rig.result()
    assert not traced.done()
    rig.submit(session, 3, decode_ready=True)
    events = json.loads(gzip.decompress(traced.result(60)))["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("forward") == names.count("sample") == 2
    rig.result()


def test_a_trace_that_was_given_up_makes_room_for_another(rig: Rig) -> None:
    session, _ = rig.open(1)
    assert rig.worker.trace(5).cancel()
    begun = rig.worker.trace(5)
    rig.submit(session, 1, **one(0, 5))
    rig.result()
    assert begun.cancel()
    traced = rig.worker.trace(1)
    rig.submit(session, 2, decode_ready=True)
    assert json.loads(gzip.decompress(traced.result(60)))["traceEvents"]
    rig.result()


def test_what_cannot_be_traced_says_so_without_a_step() -> None:
    worker = Worker(lambda: SimulatedStepExecutor(LIMITS))
    worker.start()
    worker.ready.result(10)
    with pytest.raises(NotImplementedError, match="a simulated executor"):
        worker.trace(1)
    assert worker.stop(10)
