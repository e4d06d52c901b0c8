"""The device thread over a device that is given steps ahead, as a GPU is: two at once, answered in order."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult, StepStatus
from executor_svc.device.interface import is_device_lost, is_out_of_memory
from executor_svc.worker.session import PlanSession
from executor_svc.worker.worker import Worker
from tests.helpers.scheduler.fake_executor import LIMITS


@dataclass
class Step:
    """A step that ends when the test says so."""

    step_id: int
    ended: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    tells_early: bool = False
    """Raises its error when its state is queried, as the event of a CUDA stream does."""

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self.ended.set()

    def is_done(self) -> bool:
        if self.tells_early and self.ended.is_set() and self.error is not None:
            raise self.error
        return self.ended.is_set()

    def result(self) -> StepResult:
        assert self.ended.wait(10)
        if self.error is not None:
            raise self.error
        return StepResult(self.step_id, StepStatus.OK)


class AheadExecutor:
    """Tells the test of what is launched; `errors` [step id] are raised by launches."""

    limits = LIMITS
    start_trace = None

    def __init__(self) -> None:
        self.launched: queue.SimpleQueue[Step | str] = queue.SimpleQueue()
        self.errors: dict[int, Exception] = {}
        self.error_of_clear: Exception | None = None

    def launch(self, plan: StepPlan, received_ns: int) -> Step:
        if plan.step_id in self.errors:
            raise self.errors[plan.step_id]
        step = Step(plan.step_id)
        self.launched.put(step)
        return step

    def clear(self) -> None:
        if self.error_of_clear is not None:
            raise self.error_of_clear
        self.launched.put("clear")

    def is_out_of_memory(self, exc: Exception) -> bool:
        return is_out_of_memory(exc)

    def is_lost(self, exc: Exception) -> bool:
        return is_device_lost(exc)


class Rig:
    """A worker, a session, and the results in the order of their arrival."""

    def __init__(self) -> None:
        self.executor = AheadExecutor()
        self.worker = Worker(lambda: self.executor)
        self.worker.start()
        self.results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self.session = self.open(1)

    def open(self, epoch: int) -> PlanSession:
        session, opened = self.worker.open_session(epoch, self.results.put)
        assert opened.result(10) is not None
        assert self.executor.launched.get(timeout=10) == "clear"
        return session

    def submit(self, *step_ids: int) -> None:
        for step_id in step_ids:
            self.worker.submit(self.session, StepPlan(step_id, epoch=self.session.epoch), time.monotonic_ns())

    def launched(self) -> Step:
        step = self.executor.launched.get(timeout=10)
        assert isinstance(step, Step)
        return step

    def answers(self, count: int) -> list[tuple[int, StepStatus]]:
        results = [self.results.get(timeout=10) for _ in range(count)]
        return [(result.step_id, result.status) for result in results]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    assert rig.worker.stop(10)


def test_two_steps_are_begun_and_answered_in_order(rig: Rig) -> None:
    rig.submit(1, 2, 3)
    first, second = rig.launched(), rig.launched()
    assert (first.step_id, second.step_id) == (1, 2)
    activity = rig.worker.activity()
    assert (activity.step_id, activity.num_queued) == (1, 1)
    second.end()
    assert rig.results.empty()
    assert rig.executor.launched.empty()
    first.end()
    assert rig.answers(2) == [(1, StepStatus.OK), (2, StepStatus.OK)]
    rig.launched().end()
    assert rig.answers(1) == [(3, StepStatus.OK)]
    assert rig.worker.activity().step_id == 0


def test_to_finish_answers_the_begun_steps_and_drops_the_others(rig: Rig) -> None:
    rig.submit(1, 2, 3)
    first, second = rig.launched(), rig.launched()
    finished = rig.worker.finish()
    rig.submit(4)
    first.end()
    assert rig.answers(1) == [(1, StepStatus.OK)]
    assert not finished.done()
    second.end()
    finished.result(10)
    assert rig.answers(1) == [(2, StepStatus.OK)]
    rig.submit(5)
    assert rig.worker.finish() is finished
    assert rig.worker.stop(10)
    assert rig.executor.launched.empty()


def test_a_plan_that_comes_while_one_step_runs_is_begun(rig: Rig) -> None:
    rig.submit(1)
    first = rig.launched()
    rig.submit(2)
    second = rig.launched()
    for step in (first, second):
        step.end()
    assert rig.answers(2) == [(1, StepStatus.OK), (2, StepStatus.OK)]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("2 GiB"), StepStatus.OUT_OF_MEMORY),
        (InvalidPlan("a state that the device has looked at"), StepStatus.INVALID_PLAN),
    ],
)
def test_what_began_after_a_step_that_fails_means_nothing(rig: Rig, error: Exception, status: StepStatus) -> None:
    rig.submit(1, 2, 3)
    first, second = rig.launched(), rig.launched()
    second.end()
    first.end(error)
    assert rig.answers(3) == [(1, status), (2, StepStatus.SKIPPED), (3, StepStatus.SKIPPED)]
    assert rig.executor.launched.empty()
    assert not rig.worker.lost.done()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidPlan("slot 9"), StepStatus.INVALID_PLAN),
        (torch.OutOfMemoryError("2 GiB"), StepStatus.OUT_OF_MEMORY),
        (torch.AcceleratorError("CUDA error: out of memory"), StepStatus.OUT_OF_MEMORY),
        (RuntimeError("no such kernel"), StepStatus.FAILED),
    ],
)
def test_a_launch_that_fails_leaves_the_step_before_it_alone(rig: Rig, error: Exception, status: StepStatus) -> None:
    rig.executor.errors[2] = error
    rig.submit(1, 2, 3)
    rig.launched().end()
    assert rig.answers(3) == [(1, StepStatus.OK), (2, status), (3, StepStatus.SKIPPED)]
    assert not rig.worker.lost.done()


@pytest.mark.parametrize(
    "error",
    [torch.AcceleratorError("CUDA error: 700"), RuntimeError("Triton Error [CUDA]: an illegal memory access was …")],
)
def test_a_device_that_is_lost_while_it_runs_is_reported(rig: Rig, error: Exception) -> None:
    rig.submit(1, 2)
    first, second = rig.launched(), rig.launched()
    second.end()
    first.end(error)
    assert rig.worker.lost.result(10) is error
    assert rig.answers(2) == [(1, StepStatus.FAILED), (2, StepStatus.SKIPPED)]


def test_a_device_that_is_lost_when_it_is_queried_is_reported(rig: Rig) -> None:
    rig.submit(1)
    step = rig.launched()
    step.tells_early = True
    step.end(torch.AcceleratorError("CUDA error: 700"))
    assert rig.answers(1) == [(1, StepStatus.FAILED)]
    assert rig.worker.lost.result(10) is step.error


def test_a_device_that_is_lost_between_sessions_is_reported(rig: Rig) -> None:
    error = rig.executor.error_of_clear = torch.AcceleratorError("CUDA error: 700")
    _, opened = rig.worker.open_session(2, rig.results.put)
    assert opened.exception(10) is error
    assert rig.worker.lost.result(10) is error


def test_a_new_session_hears_nothing_of_steps_that_run(rig: Rig) -> None:
    rig.submit(1, 2)
    first, second = rig.launched(), rig.launched()
    session, opened = rig.worker.open_session(2, rig.results.put)
    for step in (first, second):
        step.end()
    assert opened.result(10) <= 2
    assert rig.executor.launched.get(timeout=10) == "clear"
    rig.session = session
    rig.submit(3)
    rig.launched().end()
    assert rig.answers(1) == [(3, StepStatus.OK)]


def test_the_age_of_a_step_counts_from_the_end_of_the_one_before(rig: Rig) -> None:
    """Not from its launch, at which the device still runs the step before."""
    rig.submit(1, 2, 3)
    first, second = rig.launched(), rig.launched()
    before_ns = time.monotonic_ns()
    first.end()
    third = rig.launched()
    activity = rig.worker.activity()
    assert activity.age_ns <= time.monotonic_ns() - before_ns
    assert activity.step_id == 2
    for step in (second, third):
        step.end()
    assert rig.answers(3) == [(step_id, StepStatus.OK) for step_id in (1, 2, 3)]
