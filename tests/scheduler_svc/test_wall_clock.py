"""The wall clock of a host decides nothing: epochs, leases, deadlines and timers need durations only."""

from __future__ import annotations

import ast

import pytest

from scheduler_svc.core.types import FinishDetail
from tests.helpers.paths import ROOT
from tests.helpers.scheduler.fake_clock import FakeClock
from tests.helpers.scheduler.virtual_engine import START_S, started

READERS = {
    "scheduler_svc/plan_loop/clock.py": "for deadlines that a restart must keep",
    "scheduler_svc/requests/chats/variables.py": "the time of day, for chat templates that want it as text",
    "scheduler_svc/requests/chats/template.py": "today's date, for chat templates that say it",
    "scheduler_svc/recording/recording.py": "the time of a recording",
    "executor_svc/service/step_traces.py": "the times of spans",
    "executor_svc/startup/gpu_report.py": "the seconds since the system started the process",
}
_CALLS = frozenset({"time", "time_ns", "now", "utcnow", "today"})


def wall_clock_calls(source: str) -> list[str]:
    """Calls of time.time, time.time_ns and of the present moments of datetime, as `line: call`."""
    return [
        f"{node.lineno}: {ast.unparse(node.func)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _CALLS
        and ast.unparse(node.func.value) in ("time", "datetime", "date", "datetime.datetime", "datetime.date")
    ]


def test_calls_are_found() -> None:
    source = "time.time()\ntime.time_ns()\ndatetime.datetime.now()\ntime.monotonic()\nloop.time()\nclock.now()"
    assert wall_clock_calls(source) == ["1: time.time", "2: time.time_ns", "3: datetime.datetime.now"]


@pytest.mark.slow
def test_the_services_read_the_wall_clock_where_it_is_meant() -> None:
    files = [path for folder in ("scheduler_svc", "executor_svc") for path in (ROOT / folder).rglob("*.py")]
    files.append(ROOT / "cadenza_common" / "serving" / "heartbeats.py")
    found = {str(path.relative_to(ROOT)) for path in files if wall_clock_calls(path.read_text(encoding="utf-8"))}
    assert found == set(READERS)


async def test_sessions_and_deadlines_go_on_without_a_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose session breaks ends by its deadline, and nothing has read the wall clock."""
    monkeypatch.setattr(FakeClock, "wall_time_ns", lambda _: pytest.fail("the wall clock was read"))
    async with started() as world:
        live = world.submit(1000, deadline=START_S + 2.0)
        await world.clock.advance(0.5)
        assert world.executor.stream is not None
        world.executor.stream.break_off()
        await world.clock.advance(1.0)
        assert len(world.executor.opened_at) == 2
        assert not live.ended
        await world.clock.advance(0.6)
        assert live.ended
        assert live.times.end_ns == 3_000_000_000
        assert live.samples[0].finish is not None
        assert live.samples[0].finish.detail is FinishDetail.DEADLINE
