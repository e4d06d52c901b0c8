"""Twenty faults on real processes, and what the command does; `make chaos` runs many more."""

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
from tests.chaos.schedule import Fault, draw_schedule

SEED = 4
_LONGEST_S = 2.6
"""Some faults last longer than the 2 s after which silence is noticed, and none much longer."""
CHOSEN = (
    "kill executor", "executor link: cut", "client disconnects", "cancel", "kill scheduler", "executor link: halve",
    "clock jump", "executor link: drop", "client link: repeat", "changed executor", "deadline", "stop executor",
    "full disk", "client half-open", "executor link: repeat", "client leaves", "executor out of memory",
    "client link: cut", "executor link: stall", "client link: halve",
)  # fmt: skip


def short_schedule() -> list[Fault]:
    """Twenty faults of twenty kinds, each as the seed draws it."""
    drawn = {fault.kind: fault for fault in draw_schedule(SEED, len(FAULT_KINDS), simulated=True)}
    return [
        replace(drawn[kind], number=number, duration_s=min(drawn[kind].duration_s, _LONGEST_S))
        for number, kind in enumerate(CHOSEN)
    ]


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_twenty_faults_break_no_promise(tmp_path: Path) -> None:
    options = RunOptions(SEED, "simulated", 200, num_clients=10, num_prompts=1, slack_s=3)
    report = await run_chaos(tmp_path, short_schedule(), options)
    assert not report.violations, "\n".join(report.violations)
    assert report.by_kind == dict.fromkeys(sorted(CHOSEN), 1)
    assert report.counts["requests"] > 20
    assert report.figures["health_not_serving_changes"] >= 3


def test_a_schedule_follows_from_its_seed_and_has_every_kind() -> None:
    schedule = draw_schedule(5, 300, simulated=True)
    assert schedule == draw_schedule(5, 300, simulated=True) != draw_schedule(6, 300, simulated=True)
    assert {fault.kind for fault in schedule[: len(FAULT_KINDS)]} == {*FAULT_KINDS}
    assert "poison" not in {fault.kind for fault in draw_schedule(5, 300, simulated=False)}
    assert Counter(fault.kind for fault in schedule).most_common(1)[0][1] < 40


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


def test_health_may_be_either_while_nobody_knows() -> None:
    found: list[str] = []
    truth = Truth()
    watch = HealthWatch("", truth, found.append)
    truth.begin("slow", must=False)
    for is_serving in (True, False):
        watch.is_serving = is_serving
        watch._compare(1e9, 1e9)
    assert not found
