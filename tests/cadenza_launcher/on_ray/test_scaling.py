"""How many executors there should be, and what the scaler does about it, in virtual time."""

from __future__ import annotations

import pytest

from cadenza_launcher.on_ray.scaler import Report, Scaler
from cadenza_launcher.on_ray.scaling import ReportedLoad, Scaling


def load(num_requests: int, num_waiting: int = 0) -> ReportedLoad:
    """Of executors that run 8 sequences each, so 6 before another one is asked for."""
    return ReportedLoad(num_requests, num_waiting, 8)


@pytest.mark.parametrize(
    ("num_requests", "num_waiting", "wanted"),
    [(6, 0, 1), (7, 0, 2), (18, 4, 3), (600, 590, 4), (6, 1, 2)],
    ids=["it fits", "one more", "as many as asked for", "the most", "they wait for memory"],
)
def test_more_are_wanted_once_the_load_has_asked_for_them_long_enough(
    num_requests: int, num_waiting: int, wanted: int
) -> None:
    scaling = Scaling(1, 4, up_after_s=5, down_after_s=60)
    asked = load(num_requests, num_waiting)
    assert scaling.wanted(1, 0, asked, 0.0) == 1
    assert scaling.wanted(1, 0, asked, 4.9) == 1
    assert scaling.wanted(1, 0, asked, 5.0) == wanted


def test_a_burst_that_is_over_asks_for_none() -> None:
    scaling = Scaling(1, 4, up_after_s=5, down_after_s=60)
    for now in range(0, 60, 4):
        assert scaling.wanted(1, 0, load(20 * (now % 8 == 0)), float(now)) == 1


def test_while_one_starts_what_waits_asks_for_no_other() -> None:
    scaling = Scaling(1, 4, up_after_s=0, down_after_s=60)
    assert scaling.wanted(2, 1, load(9, 3), 0.0) == 2
    assert scaling.wanted(2, 0, load(9, 3), 1.0) == 3
    assert scaling.wanted(2, 1, load(19, 3), 2.0) == 4, "but the number of requests does"


def test_they_go_one_by_one_and_not_below_the_least() -> None:
    scaling = Scaling(2, 4, up_after_s=5, down_after_s=60)
    count, seen = 4, []
    for now in range(0, 400, 10):
        count = scaling.wanted(count, 0, load(0), float(now))
        seen.append(count)
    assert (seen[5], seen[6], seen[12], seen[13], seen[-1]) == (4, 3, 3, 2, 2)


def test_nothing_changes_while_nothing_is_known_of_the_executors() -> None:
    scaling = Scaling(1, 4, up_after_s=0, down_after_s=0)
    assert scaling.wanted(3, 0, ReportedLoad(100, 100, 0), 0.0) == 3


class FakeExecutors:
    """Executors by name; those that leave are in the scheduler until `left` is called."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.leaving: list[str] = []
        self.num_starting = 0

    @property
    def num_wanted(self) -> int:
        return len(self.names) - len(self.leaving)

    def add(self) -> str:
        self.names.append(f"e{len(self.names)}")
        return self.names[-1]

    def begin_to_leave(self) -> str | None:
        self.leaving.append(self.names[-1])
        return self.names[-1]

    def finish_leaving(self, targets: frozenset[str]) -> list[str]:
        gone = [name for name in self.leaving if name not in targets]
        self.leaving = [name for name in self.leaving if name in targets]
        self.names = [name for name in self.names if name not in gone]
        return gone


def test_an_executor_goes_when_the_scheduler_has_nothing_there_any_more() -> None:
    executors, events = FakeExecutors("e0"), []
    reports = [Report(load(9), frozenset({"e0"})), None, *[Report(load(1), frozenset({"e0", "e1"}))] * 2]
    reports.append(Report(load(1), frozenset({"e0"})))
    scaler = Scaler(executors, Scaling(1, 2, 0, 0), lambda: reports.pop(0), events.append)
    scaler.look(1.0)
    assert executors.names == ["e0", "e1"]
    scaler.look(2.0)
    scaler.look(3.0)
    assert executors.leaving == ["e1"]
    scaler.look(4.0)
    assert executors.names == ["e0", "e1"], "it still has requests"
    scaler.look(5.0)
    assert executors.names == ["e0"]
    assert events == [
        "e1 is added: 9 requests, 0 of them wait",
        "e1 is drained: 1 requests, 0 of them wait",
        "e1 has no requests left and is taken away",
    ]


def test_a_silent_scheduler_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    events: list[str] = []
    reports: list[Report | None] = [None, None, None, Report(load(1), frozenset()), None, None]
    scaler = Scaler(FakeExecutors("e0"), Scaling(1, 2, 0, 0), lambda: reports.pop(0), events.append)
    for now in (110.0, 131.0, 140.0, 150.0, 160.0):
        scaler.look(now)
    assert len(events) == 1
    scaler.look(181.0)
    assert len(events) == 2
    assert "CADENZA_TOKEN" in events[0]
