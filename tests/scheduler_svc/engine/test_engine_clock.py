"""The engine, its plan loop and the core on virtual time: no wall-clock time decides anything there."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

from cadenza_common.plan.plan import StepPlan
from scheduler_svc.core.types import FinishDetail
from scheduler_svc.plan_loop.clock import SystemClock
from tests.helpers.paths import ROOT
from tests.helpers.scheduler.virtual_engine import START_S, STEP_S, started


async def test_a_request_takes_its_steps_on_the_clock() -> None:
    async with started() as world:
        live = world.submit(4)
        await world.clock.advance(10 * STEP_S)
        times = live.times
        assert live.ended
        assert (times.arrival_ns, times.first_plan_ns) == (1_000_000_000, 1_000_000_000)
        assert (times.first_token_ns, times.end_ns) == (1_010_000_000, 1_040_000_000)


async def test_plans_are_sent_late_in_the_running_step() -> None:
    """0.7 of the predicted 10 ms less a margin of 4 ms: 3 ms into each step, once one of a token was seen."""
    async with started() as world:
        world.submit(5)
        await world.clock.advance(10 * STEP_S)
        assert world.executor.stream is not None
        planned_at = [moment - START_S for moment in world.executor.stream.planned_at[:5]]
        assert planned_at == pytest.approx([0.0, 0.0, 0.010, 0.023, 0.033])


async def test_the_next_plan_goes_before_the_outputs_of_a_step() -> None:
    """With steps of 1 ms a plan is due as soon as a result is there: readers learn of it while the next step runs.

    A first token goes before the plan.
    """
    async with started(step_s=0.001) as world:
        live = world.submit(20)
        stream = world.executor.stream
        assert stream is not None
        seen: list[tuple[int, int]] = []
        live.subscribe(lambda _: seen.append((live.num_completion_tokens, len(stream.planned_at))))
        await world.clock.advance(0.0145)
        assert [tokens for tokens, _ in seen] == list(range(1, 15))
        # Two plans before the first result, and one more before the outputs of each later one.
        assert [plans - tokens for tokens, plans in seen] == [1] + [2] * 13


async def test_an_abort_between_a_result_and_its_outputs_keeps_them() -> None:
    async with started(step_s=0.001) as world:
        live = world.submit(20)
        stream = world.executor.stream
        assert stream is not None
        send = stream.send

        async def aborting(plan: StepPlan) -> None:
            await send(plan)
            if plan.step_id == 4:  # sent after the second result, and before its outputs
                assert live.samples[0].token_ids == [9]
                world.engine.abort("", "r")

        stream.send = aborting  # type: ignore[method-assign]
        await world.clock.advance(0.0025)
        assert live.ended
        assert live.samples[0].token_ids == [9, 9]
        assert live.samples[0].finish is not None
        assert live.samples[0].finish.detail is FinishDetail.ABORTED


async def test_a_deadline_ends_a_request_between_two_steps() -> None:
    async with started() as world:
        live = world.submit(100, deadline=START_S + 0.025)
        await world.clock.advance(0.024)
        assert not live.ended
        await world.clock.advance(0.002)
        assert live.ended
        assert live.times.end_ns == 1_025_000_000
        assert live.samples[0].finish is not None
        assert live.samples[0].finish.detail is FinishDetail.DEADLINE
        assert live.num_completion_tokens == 2


async def test_a_lost_session_is_opened_again_after_a_pause() -> None:
    async with started() as world:
        live = world.submit(6)
        await world.clock.advance(0.015)
        assert world.executor.stream is not None
        world.executor.stream.break_off()
        await world.clock.advance(1.0)
        assert world.executor.opened_at == pytest.approx([START_S, START_S + 0.215])
        assert live.ended
        # One token was in; the other five take a step each from the new session's begin.
        assert live.times.end_ns == pytest.approx(1_265_000_000)


async def test_a_drain_waits_as_long_as_it_may() -> None:
    async with started() as world:
        world.submit(100)
        draining = asyncio.create_task(world.engine.drain(0.05))
        await world.clock.advance(0.049)
        assert not draining.done()
        await world.clock.advance(0.002)
        assert draining.result() == 1


async def test_the_system_clock_goes_on_and_its_timers_run() -> None:
    clock = SystemClock()
    before = clock.monotonic_ns()
    await clock.sleep(0.001)
    assert clock.monotonic_ns() - before >= 1_000_000
    assert clock.monotonic() == pytest.approx(clock.monotonic_ns() / 1e9, abs=1.0)
    with pytest.raises(TimeoutError):
        async with clock.timeout(0.001):
            await asyncio.Event().wait()
    async with clock.timeout(None):
        assert clock.wall_time_ns() > 1_600_000_000_000_000_000


_TIMED_CALLS = frozenset({"sleep", "timeout", "timeout_at", "wait_for", "call_later", "call_at", "time"})


def timed_calls(source: str) -> list[str]:
    """Uses of the operating system's or the event loop's time, as `line: what`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(alias.name == "time" for alias in node.names):
            found.append(f"{node.lineno}: import time")
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found.append(f"{node.lineno}: from time")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TIMED_CALLS:
            owner = ast.unparse(node.func.value)
            if owner.startswith("asyncio") or owner.endswith("get_running_loop()"):
                found.append(f"{node.lineno}: {owner}.{node.func.attr}")
    return found


def test_timed_calls_are_found() -> None:
    source = "import time\nasyncio.sleep(1)\nasyncio.get_running_loop().call_later(1, f)\nself._clock.sleep(1)"
    assert len(timed_calls(source)) == 3


@pytest.mark.parametrize(
    "path", sorted((ROOT / "scheduler_svc" / "engine").glob("*.py")), ids=lambda path: Path(path).name
)
def test_only_the_clock_reads_the_time(path: Path) -> None:
    if path.name != "clock.py":
        assert timed_calls(path.read_text()) == []
