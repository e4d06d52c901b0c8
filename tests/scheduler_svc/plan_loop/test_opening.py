"""Opening a session on virtual time: refused epochs, and executors that another scheduler holds, dead or alive."""

from __future__ import annotations

import asyncio
import logging

import pytest

from scheduler_svc.plan_loop.opening import open_session
from scheduler_svc.plan_loop.ports import (
    ExecutorFencedError,
    ExecutorHeldError,
    ExecutorLostError,
    ModelDescription,
    PlanStream,
    StaleEpochError,
)
from tests.helpers.scheduler.fake_clock import FakeClock, TimedExecutor
from tests.helpers.scheduler.virtual_engine import MODEL

LEASE_S = 2.0


class ContestedExecutor(TimedExecutor):
    """Refuses epochs that are not larger than the last, and other schedulers while its holder's lease lasts."""

    def __init__(self, clock: FakeClock, model: ModelDescription = MODEL) -> None:
        super().__init__(clock, model, 0.01)
        self.last_epoch = 0
        self.lease_s = LEASE_S
        self.heard_at: list[float] = []
        """The moments of the holder's messages, in the past and in the future; empty: no scheduler holds it."""
        self.epochs: list[int] = []
        """The epochs of all openings."""
        self.rivals = 0
        """How often another process of this scheduler opens a session just before an opening arrives."""

    async def open(self, epoch: int) -> PlanStream:
        self.epochs.append(epoch)
        now = self.clock.monotonic()
        heard = [moment for moment in self.heard_at if moment <= now]
        if heard and now - heard[-1] < self.lease_s:
            raise ExecutorHeldError("scheduler X holds this executor", now - heard[-1])
        if self.rivals:
            self.rivals -= 1
            self.last_epoch = max(self.last_epoch, epoch)
        if epoch <= self.last_epoch:
            raise StaleEpochError("too small", self.last_epoch + 1)
        self.last_epoch = epoch
        return await super().open(epoch)


@pytest.fixture
def executor() -> ContestedExecutor:
    return ContestedExecutor(FakeClock())


async def opened_after(
    executor: ContestedExecutor, limit_s: float = 10.0, held_at: float | None = None
) -> tuple[float, int]:
    """Seconds until a session opened with epoch 1 was open, and its epoch; raises as open_session does."""
    clock = executor.clock
    assert isinstance(clock, FakeClock)
    began = clock.monotonic()
    opening = asyncio.create_task(open_session(executor, clock, 1, held_at))
    await clock.advance(0)
    while not opening.done() and clock.monotonic() - began < limit_s:
        await clock.advance(0.01)
    assert opening.done(), f"neither open nor refused after {limit_s} s"
    _, epoch = await opening
    return clock.monotonic() - began, epoch


async def test_the_first_epoch_is_right_for_a_new_executor(executor: ContestedExecutor) -> None:
    assert await opened_after(executor) == (0.0, 1)
    assert executor.epochs == [1]


async def test_the_executor_names_the_epoch(executor: ContestedExecutor) -> None:
    executor.last_epoch = 1_790_000_000_000
    assert await opened_after(executor) == (0.0, 1_790_000_000_001)
    assert len(executor.epochs) == 2


async def test_a_race_between_openings_is_tried_again_at_once(executor: ContestedExecutor) -> None:
    executor.rivals = 3
    assert await opened_after(executor) == (0.0, 4)
    assert executor.epochs == [1, 2, 3, 4]


async def test_epochs_are_not_raised_for_ever(executor: ContestedExecutor) -> None:
    executor.rivals = 1000
    with pytest.raises(StaleEpochError):
        await opened_after(executor)
    assert len(executor.epochs) == 5


async def test_a_dead_holder_is_waited_out(executor: ContestedExecutor, caplog: pytest.LogCaptureFixture) -> None:
    """Killed 0.1 s ago, and two of its messages are still on their way."""
    began = executor.clock.monotonic()
    executor.heard_at = [began - 0.1, began + 0.4, began + 0.9]
    with caplog.at_level(logging.WARNING):
        waited_s, _ = await opened_after(executor)
    assert 0.9 + LEASE_S <= waited_s < 0.9 + LEASE_S + 0.15
    assert [record.getMessage() for record in caplog.records] == [
        "executor virtual: scheduler X holds this executor; waiting for the end of its lease"
    ]


async def test_a_live_holder_fences(executor: ContestedExecutor) -> None:
    began = executor.clock.monotonic()
    executor.heard_at = [began - 0.3 + 0.5 * number for number in range(100)]
    with pytest.raises(ExecutorFencedError, match=r"^scheduler X holds this executor$"):
        await opened_after(executor)
    assert 1.0 < executor.clock.monotonic() - began < 2.0


async def test_a_known_holder_is_refused_at_its_first_message_and_not_logged_again(
    executor: ContestedExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    now = executor.clock.monotonic()
    executor.heard_at = [now - 0.3]
    with pytest.raises(ExecutorFencedError):
        await opened_after(executor, held_at=now - 1.0)
    assert executor.epochs == [1]
    waited_s, _ = await opened_after(executor, held_at=now - 0.1)
    assert waited_s < LEASE_S
    assert not caplog.records


async def test_a_late_end_of_a_lease_is_no_sign_of_life(executor: ContestedExecutor) -> None:
    """An executor that is always busy notices the silence of a dead scheduler after twice the time or more."""
    executor.heard_at, executor.lease_s = [executor.clock.monotonic()], 10.0
    waited_s, _ = await opened_after(executor, 60.0)
    assert 10.0 <= waited_s < 10.15


async def test_a_wall_clock_plays_no_part(executor: ContestedExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even at the first opening, on an executor whose last epoch came from one."""
    monkeypatch.setattr(executor.clock, "wall_time_ns", lambda: pytest.fail("the wall clock was read"))
    executor.last_epoch = 1_790_000_000_000
    assert (await opened_after(executor))[1] == 1_790_000_000_001


async def test_other_errors_pass(executor: ContestedExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_: int) -> PlanStream:
        raise ExecutorLostError("gone")

    monkeypatch.setattr(executor, "open", refuse)
    with pytest.raises(ExecutorLostError, match="gone"):
        await opened_after(executor)
