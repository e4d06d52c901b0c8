"""Supervision in virtual time: when a service is started again, when it is killed, and when it is given up."""

from __future__ import annotations

import pytest

from cadenza.errors import LocalServiceError
from cadenza_launcher.services.supervised_service import RestartPolicy, SupervisedService

TICK_S = 0.1


class FakeChild:
    """A process that does what its fields say."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.is_ready = False
        self.code: int | None = None
        self.reason = ""
        self.kills: list[str] = []
        self.is_released = False

    def exit_code(self) -> int | None:
        return self.code

    def exit_reason(self) -> str:
        return self.reason

    def kill(self, reason: str) -> None:
        self.kills.append(reason)
        self.die(reason)

    def stop(self, grace_s: float) -> None:
        self.is_released = True

    def die(self, reason: str) -> None:
        self.code, self.reason = 1, reason


class World:
    """A supervised executor that is ready, and a clock."""

    def __init__(self, max_deaths: int | None = None, policy: RestartPolicy | None = None) -> None:
        self.now = 100.0
        self.children = [FakeChild(1)]
        self.children[0].is_ready = True
        self.events: list[str] = []
        self.num_back = 0
        self.steps = False
        self.refused = ""
        self.states: dict[int, str] = {}
        self.service = SupervisedService(
            "the executor",
            self.children[0],
            self.now,
            spawn=self.spawn,
            policy=policy or RestartPolicy(max_deaths=max_deaths),
            start_timeout_s=60.0,
            completed_step=lambda: self.steps,
            on_event=self.events.append,
            on_back=self.back,
            state_of=lambda pid: self.states.get(pid, "S"),
        )

    @property
    def child(self) -> FakeChild:
        return self.children[-1]

    def spawn(self) -> FakeChild:
        if self.refused:
            raise LocalServiceError(self.refused)
        self.children.append(FakeChild(len(self.children) + 1))
        return self.child

    def back(self) -> None:
        self.num_back += 1

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.service.look(self.now)

    def die_and_return(self, lived_s: float = 0.0) -> float:
        """The child dies after this time; returns the delay until another one was started, which is ready at once."""
        self.run(lived_s)
        self.child.die("killed by signal 9")
        died, count = self.now, len(self.children)
        while len(self.children) == count:
            self.run(TICK_S)
        started = self.now
        self.child.is_ready = True
        self.run(TICK_S)
        return started - died


@pytest.fixture
def world() -> World:
    return World()


def test_the_delay_doubles_up_to_its_limit_and_never_ends(world):
    delays = [world.die_and_return() for _ in range(12)]
    doubled = [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30, 30, 30]
    assert delays == pytest.approx(doubled, abs=2.5 * TICK_S)
    assert world.num_back == 12
    assert all(child.is_released for child in world.children[:-1])
    assert world.events[0] == "the executor died (killed by signal 9); starting it again in 0.2 s"
    assert world.events[-1] == (
        "the executor died (killed by signal 9); it has died 12 times without progress; starting it again in 30 s"
    )
    assert RestartPolicy().delay_s(10**6) == 30.0


def test_a_service_that_was_told_to_stop_has_not_died(world):
    """As in a rolling restart, more often than deaths are allowed."""
    for _ in range(12):
        world.child.code, world.child.reason = 0, "exit code 0"
        count = len(world.children)
        world.run(0.4)
        assert len(world.children) == count + 1
        world.child.is_ready = True
        world.run(TICK_S)
    assert set(world.events) == {"the executor was stopped; starting it again in 0.2 s"}


def test_a_completed_step_takes_the_delay_back_to_its_start(world):
    for _ in range(3):
        world.die_and_return()
    world.steps = True
    assert world.die_and_return() == pytest.approx(0.2, abs=2.5 * TICK_S)
    assert world.events[-1] == "the executor died (killed by signal 9); starting it again in 0.2 s"


def test_a_life_of_ten_seconds_takes_the_delay_back_to_its_start(world):
    for _ in range(3):
        world.die_and_return()
    assert world.die_and_return(lived_s=9.5) == pytest.approx(1.6, abs=2.5 * TICK_S)
    assert world.die_and_return(lived_s=10.5) == pytest.approx(0.2, abs=2.5 * TICK_S)


def test_a_life_between_two_looks_counts(world):
    """It was ready and completed a step, and both are known only after its death."""
    world.die_and_return()
    world.steps = True
    world.child.die("killed by signal 9")
    world.run(0.5)
    world.child.is_ready = True
    world.child.die("killed by signal 9")
    world.run(TICK_S)
    assert world.num_back == 2
    assert world.events[2:] == ["the executor died (killed by signal 9); starting it again in 0.2 s"]


def test_loading_is_no_progress_however_long_it_takes(world):
    """Nor does a step count that an earlier process completed: only a process that was ready is asked about."""
    world.steps = True
    world.die_and_return()
    world.child.is_ready = False
    world.child.die("killed by signal 9")
    world.run(0.5)
    for num_deaths in (2, 3, 4):
        world.run(30)  # loads
        world.child.die("exit code 1: no such model")
        world.run(TICK_S)
        assert world.events[-1].startswith(
            f"the executor did not start (exit code 1: no such model); it has died {num_deaths} times without progress"
        )
        world.run(4)


def test_max_deaths_without_progress_give_it_up():
    world = World(max_deaths=3)
    world.die_and_return()
    world.steps = True
    world.die_and_return()
    world.steps = False
    world.die_and_return()
    world.child.die("exit code 3: broken")
    with pytest.raises(
        LocalServiceError,
        match=r"^the executor died \(exit code 3: broken\); it has died 3 times without progress and is given up$",
    ):
        world.run(TICK_S)


def test_a_scheduler_that_served_for_a_second_comes_back_at_once():
    world = World(policy=RestartPolicy(max_deaths=None).of_scheduler())
    assert [world.die_and_return(1.1) for _ in range(12)] == pytest.approx([0.2] * 12, abs=2.5 * TICK_S)
    assert max(world.die_and_return(0.5) for _ in range(12)) == pytest.approx(5.0, abs=2.5 * TICK_S)


def test_a_process_that_the_system_refuses_counts_as_a_death(world):
    world.refused = "[Errno 12] Cannot allocate memory"
    world.child.die("killed by signal 9")
    world.run(1.2)
    assert world.events[1:] == [
        "the executor did not start ([Errno 12] Cannot allocate memory); it has died 2 times without progress; "
        "starting it again in 0.4 s",
        "the executor did not start ([Errno 12] Cannot allocate memory); it has died 3 times without progress; "
        "starting it again in 0.8 s",
    ]
    world.refused = ""
    world.run(1.0)
    world.child.is_ready = True
    world.run(TICK_S)
    assert world.num_back == 1


def test_one_that_is_not_ready_in_time_is_killed(world):
    world.child.die("killed by signal 9")
    world.run(0.5)
    world.run(59)
    assert world.child.kills == []
    world.run(1.5)
    assert world.children[1].kills == ["killed because it was not ready after 60 s"]
    assert "the executor did not start (killed because it was not ready after 60 s)" in world.events[-1]


@pytest.mark.parametrize("is_ready", [True, False])
def test_one_that_is_stopped_is_killed_and_started_again(world, is_ready):
    world.die_and_return()
    world.child.is_ready = is_ready
    world.run(1)
    world.states[2] = "T"
    world.run(3.0)
    assert world.child.kills == []
    world.run(0.3)
    assert world.children[1].kills == ["killed because a signal had stopped it for 3 s"]
    assert "killed because a signal had stopped it for 3 s" in world.events[-1]
    world.run(1.0)
    assert len(world.children) == 3
