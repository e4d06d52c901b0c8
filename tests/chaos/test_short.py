"""A few faults on real processes, and what the command does; `make chaos` runs many more."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.__main__ import main
from tests.chaos.health import HealthWatch, Truth
from tests.chaos.history import read_schedule
from tests.chaos.run import RunOptions, run_chaos
from tests.chaos.schedule import KINDS as FAULT_KINDS
from tests.chaos.schedule import KINDS_OF_SEVERAL, Fault, draw_schedule

SEED = 4
_LONGEST_S = 2.6
"""Some faults last longer than the 2 s after which silence is noticed, and none much longer."""
CHOSEN = {
    1: (
        "kill executor", "executor link: cut", "client disconnects", "kill scheduler", "executor link: halve",
        "client link: repeat", "deadline", "client half-open", "full disk",
    ),
    2: (
        "executor drains", "kill executor", "executor joins and leaves", "list of executors changes", "client leaves",
        "one executor stops, one drains", "executor is removed and added", "changed executor", "all executors die",
        "kill scheduler", "executor link: stall",
    ),
}  # fmt: skip
"""By number of executors. Clocks jump in tests/faults/test_moved_clocks.py, and in tests.chaos: as new interpreters."""


def short_schedule(num_executors: int) -> list[Fault]:
    """Each kind once, as the seed draws it."""
    count = len(FAULT_KINDS) + len(KINDS_OF_SEVERAL)
    drawn = {fault.kind: fault for fault in draw_schedule(SEED, count, simulated=True, num_executors=num_executors)}
    return [
        replace(drawn[kind], number=number, duration_s=min(drawn[kind].duration_s, _LONGEST_S))
        for number, kind in enumerate(CHOSEN[num_executors])
    ]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_executors", CHOSEN)
async def test_a_few_faults_break_no_promise(tmp_path: Path, num_executors: int) -> None:
    options = RunOptions(SEED, "simulated", 200, num_executors, num_clients=6, num_prompts=1, slack_s=3)
    report = await run_chaos(tmp_path, short_schedule(num_executors), options)
    assert not report.violations, "\n".join(report.violations)
    assert report.by_kind == dict.fromkeys(sorted(CHOSEN[num_executors]), 1)
    assert report.counts["requests"] > 20
    assert report.figures["health_not_serving_changes"] >= 1


def test_a_schedule_follows_from_its_seed_and_has_every_kind() -> None:
    schedule = draw_schedule(5, 300, simulated=True)
    assert schedule == draw_schedule(5, 300, simulated=True) != draw_schedule(6, 300, simulated=True)
    assert {fault.kind for fault in schedule[: len(FAULT_KINDS)]} == {*FAULT_KINDS}
    assert "poison" not in {fault.kind for fault in draw_schedule(5, 300, simulated=False)}
    assert Counter(fault.kind for fault in schedule).most_common(1)[0][1] < 40


def test_faults_of_several_executors_pick_one() -> None:
    schedule = draw_schedule(5, 300, simulated=True, num_executors=4)
    first = {fault.kind for fault in schedule[: len(FAULT_KINDS) + len(KINDS_OF_SEVERAL)]}
    assert first == {*FAULT_KINDS, *KINDS_OF_SEVERAL}
    assert {fault.executor for fault in schedule if fault.kind == "kill executor"} == {0, 1, 2, 3}
    assert not {fault.kind for fault in draw_schedule(5, 300, simulated=True)} & {*KINDS_OF_SEVERAL}


def test_a_history_gives_its_schedule_back(tmp_path: Path) -> None:
    """Lines may be taken out of it, to find which fault is to blame."""
    schedule = draw_schedule(5, 4, simulated=True)
    records = [{"record": "run", "options": {"seed": 5, "executor": "cpu"}}]
    records += [{"record": "scheduled", "fault": fault.to_json()} for fault in schedule[1:]]
    file = tmp_path / "history.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in records))
    assert read_schedule(file) == ({"seed": 5, "executor": "cpu"}, schedule[1:])


def test_a_file_that_is_no_history_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text('{"record": "fault"}\n')
    with pytest.raises(SystemExit, match="2"):
        main(["--replay", str(file)])
    assert "has no record of a run" in capsys.readouterr().err


def test_health_that_lies_is_reported_once() -> None:
    """Times are those of looks, in seconds."""
    found: list[str] = []
    truth = Truth()
    watch = HealthWatch("", truth, found.append)
    truth.begin("executor")
    assert truth.wrong_since is not None
    since = truth.wrong_since
    watch.is_serving = True
    watch._compare(since + 0.1, since + 0.1)
    watch._compare(since + 2.9, since + 2.9)
    assert not found
    watch._compare(since + 3.1, since + 3.1)
    watch._compare(since + 3.2, since + 3.2)
    (text,) = found
    assert "health is not NOT_SERVING 3.1 s after" in text
    truth.end("executor")
    assert truth.right_since is not None
    watch.is_serving = True
    watch._compare(truth.right_since + 0.2, truth.right_since + 0.2)
    assert watch.lags_s["SERVING"] == pytest.approx([0.2])
    watch.is_serving = False
    watch._compare(truth.right_since + 5.0, truth.right_since + 5.0)
    watch._compare(truth.right_since + 8.1, truth.right_since + 8.1)
    assert len(found) == 2, "it was true, and became false without a reason"


def test_health_must_be_serving_while_one_executor_is_right() -> None:
    truth = Truth(2)
    began = truth.right_since
    truth.begin("dead", 0)
    assert (truth.right_since, truth.wrong_since) == (began, None)
    truth.begin("drained", 1, must=False)
    assert (truth.right_since, truth.wrong_since) == (None, None), "an executor that drains may serve after a restart"
    truth.begin("stopped", 1)
    assert truth.wrong_since is not None
    truth.begin("joined", 2, must=False)
    assert (truth.right_since, truth.wrong_since) == (None, None), "the spare may serve"
    truth.end("joined", 2)
    assert truth.wrong_since is not None
    truth.end("dead", 0)
    assert truth.right_since is not None
    assert truth.reasons == ["drained (1)", "stopped (1)"]
    truth.begin("scheduler")
    assert truth.right_since is None
    assert truth.wrong_since is not None


def test_health_that_stays_serving_by_another_executor_is_no_change() -> None:
    found: list[str] = []
    truth = Truth(2)
    watch = HealthWatch("", truth, found.append)
    truth.begin("dead", 1)
    truth.end("dead", 1)
    truth.begin("dead", 0)
    assert truth.right_since is not None
    watch.is_serving = True
    watch._compare(truth.right_since + 50.0, truth.right_since + 50.0)
    assert watch.lags_s["SERVING"] == []
    watch.is_serving = False
    watch._compare(truth.right_since + 51.0, truth.right_since + 51.0)
    assert not found
    watch._compare(truth.right_since + 54.5, truth.right_since + 54.5)
    (text,) = found
    assert "health is not SERVING 3.5 s after" in text


def test_health_may_be_either_while_nobody_knows() -> None:
    found: list[str] = []
    truth = Truth()
    watch = HealthWatch("", truth, found.append)
    truth.begin("slow", must=False)
    for is_serving in (True, False):
        watch.is_serving = is_serving
        watch._compare(1e9, 1e9)
    assert not found
