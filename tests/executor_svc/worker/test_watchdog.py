"""The watchdog: a step that is older than its timeout, whatever else the process does or suffers."""

from __future__ import annotations

import queue
from collections.abc import Callable

import pytest

from executor_svc.worker.session import Activity
from executor_svc.worker.watchdog import StepWatchdog

SECOND = 1_000_000_000


class Steps:
    """The device thread's activity as a test sets it, on virtual time: `step_id` runs since `since_ns`."""

    def __init__(self) -> None:
        self.now_ns = self.since_ns = 10 * SECOND
        self.step_id = 0

    def begin(self, step_id: int) -> None:
        self.step_id, self.since_ns = step_id, self.now_ns

    def activity(self) -> Activity:
        return Activity(self.step_id, self.now_ns - self.since_ns if self.step_id else 0, 0)


def hung_at(steps: Steps, watchdog: StepWatchdog, seconds: float) -> float | None:
    """Seconds from now to the check, one a second, at which the step is hung; None: not within `seconds`."""
    start_ns = steps.now_ns
    while steps.now_ns < start_ns + seconds * SECOND:
        steps.now_ns += SECOND
        if watchdog.is_hung(steps.now_ns):
            return (steps.now_ns - start_ns) / SECOND
    return None


def watched(timeout_s: float) -> tuple[Steps, StepWatchdog]:
    steps = Steps()
    watchdog = StepWatchdog(steps.activity, timeout_s, pytest.fail)
    watchdog.is_hung(steps.now_ns)
    return steps, watchdog


def test_a_step_that_is_too_old_hangs(caplog: pytest.LogCaptureFixture) -> None:
    steps, watchdog = watched(30.0)
    steps.begin(7)
    assert hung_at(steps, watchdog, 100) == 31
    assert [record.getMessage() for record in caplog.records] == [
        "step 7 has run for 31.0 s, longer than --step-timeout-s 30: this process ends"
    ]
    assert caplog.records[0].levelname == "ERROR"


def test_an_idle_executor_and_many_steps_do_not_hang() -> None:
    steps, watchdog = watched(30.0)
    assert hung_at(steps, watchdog, 100) is None
    for step_id in range(1, 20):
        steps.begin(step_id)
        assert hung_at(steps, watchdog, 29) is None


@pytest.mark.parametrize("begun_before_s", [0, 5])
def test_the_time_of_a_suspended_process_does_not_count(begun_before_s: int) -> None:
    """Whether the watchdog saw the step before or not."""
    steps, watchdog = watched(30.0)
    steps.begin(1)
    assert hung_at(steps, watchdog, begun_before_s) is None
    steps.now_ns += 3600 * SECOND
    assert hung_at(steps, watchdog, 100) == 31 - begun_before_s


def test_a_step_that_begins_after_the_suspension_is_not_given_more_time() -> None:
    steps, watchdog = watched(30.0)
    steps.begin(1)
    assert hung_at(steps, watchdog, 5) is None
    steps.now_ns += 3600 * SECOND
    steps.begin(2)
    assert hung_at(steps, watchdog, 100) == 32, "a check more: the first one cannot know when the suspension ended"


def test_its_thread_reports_a_hang_once_and_can_be_stopped() -> None:
    hung: queue.SimpleQueue[bool] = queue.SimpleQueue()
    report: Callable[[], None] = lambda: hung.put(True)  # noqa: E731
    watchdog = StepWatchdog(lambda: Activity(3, 60 * SECOND, 0), 0.01, report)
    watchdog.start()
    assert hung.get(timeout=10)
    watchdog.stop()
    assert hung.empty()
    idle = StepWatchdog(lambda: Activity(0, 0, 0), 0.01, report)
    idle.start()
    idle.stop()
    assert hung.empty()
