"""The parts of a stall, from the moments of a run."""

from __future__ import annotations

import pytest

from tests.chaos.load import Gap
from tests.chaos.schedule import Fault
from tests.chaos.services import Mark
from tests.chaos.stalls import percentile, splits


def fault(kind: str) -> Fault:
    return Fault(0, kind, 0.0, 0.0, waits=True, draw=0.0)


KILL = (100.0, fault("kill executor"))
MARKS = [Mark(90.0, "open"), Mark(100.01, "lost"), Mark(100.3, "executor started"), Mark(101.5, "open")]


def test_a_kill_splits_into_four_parts() -> None:
    """Of three gaps one ended before the kill, and one began after it."""
    gaps = [Gap(95.0, 96.0), Gap(99.9, 101.7), Gap(101.6, 102.0)]
    parts = splits([KILL, (101.0, fault("client link: cut"))], MARKS, gaps, "executor")
    assert {name: pytest.approx(values) for name, values in parts.items()} == {
        "noticing": [0.01], "restart": [0.29], "loading": [1.2], "recompute": [0.2], "stall": [1.8],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("moments", "marks"),
    [
        ([KILL, (101.0, fault("stop executor"))], MARKS),
        ([KILL], [each for each in MARKS if each.what != "lost"] + [Mark(120.0, "lost")]),
        ([KILL], MARKS[:-1]),
        ([(100.0, fault("executor link: cut"))], MARKS),
    ],
    ids=["another fault came", "no session was there", "no session came", "no kill"],
)
def test_other_kills_do_not_count(moments: list[tuple[float, Fault]], marks: list[Mark]) -> None:
    assert not any(splits(moments, marks, [], "executor").values())


def test_a_killed_scheduler_is_noticed_by_the_supervisor_and_back_when_it_is_ready() -> None:
    marks = [Mark(100.1, "scheduler died"), Mark(100.3, "scheduler started"), Mark(100.8, "open")]
    marks.append(Mark(101.3, "scheduler ready"))
    parts = splits([(100.0, fault("kill scheduler"))], marks, [Gap(100.0, 101.5)], "scheduler")
    assert parts["loading"] == pytest.approx([1.0])
    assert parts["recompute"] == pytest.approx([0.2])


def test_percentiles() -> None:
    assert (percentile([], 0.5), percentile([3.0, 1.0, 2.0], 0.5), percentile([3.0, 1.0], 0.99)) == (0.0, 2.0, 3.0)
