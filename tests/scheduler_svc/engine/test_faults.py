"""Faults are counted once each, by kind, with the executor and the time of the last one; on virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cadenza.calls.convert import server_info_from_proto
from cadenza.v1 import generation_pb2 as pb
from executor_svc.simulated.injection import Poison
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.convert.errors import UnreadableMessageError
from scheduler_svc.convert.generation import fault_counts
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.faults import FaultKind
from scheduler_svc.engine.fleet.executor_member import MOVE_AFTER_S
from scheduler_svc.front.front import Front
from scheduler_svc.journal.journal import connect
from scheduler_svc.journal.store import JournalStore
from scheduler_svc.journal.writer import JournalWriter
from tests.helpers.scheduler.changing_executor import OTHER_NUMERICS, STEP_S
from tests.helpers.scheduler.fleet_world import fleet


def counts(engine: Engine) -> dict[FaultKind, int]:
    """The kinds that have occurred, with their counts."""
    return {fault: each.count for fault, each in engine.faults if each.count}


async def test_every_kind_is_in_the_server_info_by_its_name() -> None:
    async with fleet(1) as world:
        assert fault_counts(world.engine.faults) == []
        for number, fault in enumerate(FaultKind, start=1):
            world.engine.faults.record(fault, "e:0", count=number)
        await world.clock.advance(2.0)
        info = server_info_from_proto(pb.GetServerInfoResponse(faults=fault_counts(world.engine.faults)))
        assert [(each.kind, each.count) for each in info.faults] == [(f, n) for n, f in enumerate(FaultKind, start=1)]
        assert {(each.last_age_s, each.last_executor) for each in info.faults} == {(2.0, "e:0")}
        assert len(FaultKind) + 1 == len(pb.FaultKind.values())
        unknown = server_info_from_proto(pb.GetServerInfoResponse(faults=[pb.FaultCount(kind=99, count=1)]))
        assert unknown.faults[0].kind == "fault 99"


async def test_nothing_is_counted_while_all_is_well() -> None:
    async with fleet() as world:
        world.submit_mix()
        world.engine.abort("", "r1")
        await world.run()
        await world.engine.executors.drain("e:0", 1.0)
        await world.engine.executors.remove("e:0")
        world.executors[1].die(stopped=True)
        await world.clock.advance(1.0)
        assert counts(world.engine) == {}


@pytest.mark.slow
async def test_a_dead_executor_its_suspects_its_moved_requests_and_its_successor_are_counted() -> None:
    async with fleet() as world:
        world.submit_mix(max_tokens=60)
        await world.clock.advance(12.5 * STEP_S)
        held = {name for name in world.live if world.holder(name) == 0}
        world.executors[0].die()
        await world.clock.advance(MOVE_AFTER_S + STEP_S)
        assert world.engine.faults[FaultKind.EXECUTOR_LOST].last_executor == "e:0"
        assert world.engine.faults.last_age_s(FaultKind.EXECUTOR_LOST) == round(MOVE_AFTER_S + STEP_S, 6)
        await world.run()
        world.executors[0].come_back()
        await world.clock.advance(1.0)
        found = counts(world.engine)
        assert 0 < found.pop(FaultKind.REQUEST_SUSPECTED) <= len(held)
        assert 0 < found.pop(FaultKind.REQUEST_MOVED) <= len(held)
        assert found == {FaultKind.EXECUTOR_LOST: 1, FaultKind.EXECUTOR_RESTARTED: 1}
        assert world.engine.faults[FaultKind.EXECUTOR_RESTARTED].last_executor == "e:0"


async def test_a_hung_executor_is_counted_once() -> None:
    async with fleet(1) as world:
        world.submit("a")
        await world.clock.advance(8.5 * STEP_S)
        world.executors[0].goes_on.clear()
        await world.clock.advance(5.0)
        assert counts(world.engine) == {FaultKind.EXECUTOR_STALLED: 1}
        assert world.engine.faults[FaultKind.EXECUTOR_STALLED].last_executor == "e:0"


async def test_a_request_that_fails_every_step_is_counted_with_these_steps() -> None:
    async with fleet(1) as world:
        world.executors[0].poison = Poison(1, 10)
        world.executors[0].break_off()
        await world.clock.advance(1.0)
        before = world.engine.faults[FaultKind.EXECUTOR_LOST].count
        live = world.submit("a")
        await world.run()
        assert live.failed
        found = counts(world.engine)
        assert found[FaultKind.REQUEST_FAILED] == 1
        assert found[FaultKind.STEP_FAILED] == found[FaultKind.EXECUTOR_LOST] - before == 4
        assert found[FaultKind.REQUEST_SUSPECTED] == 1


async def test_executors_that_cannot_be_used_are_counted_once_for_each_reason() -> None:
    async with fleet(
        models=[{}, {"fingerprint": OTHER_NUMERICS["fingerprint"], "numerics": (("weights", "2"),)}]
    ) as world:
        await world.clock.advance(5.0)
        assert counts(world.engine) == {FaultKind.EXECUTOR_REFUSED: 1}
    async with fleet() as world:
        world.executors[1].fences = True
        world.executors[1].break_off()
        await world.clock.advance(3.0)
        assert counts(world.engine) == {FaultKind.EXECUTOR_REFUSED: 1, FaultKind.EXECUTOR_LOST: 1}
        assert world.engine.faults[FaultKind.EXECUTOR_REFUSED].last_executor == "e:1"


async def test_refused_requests_are_counted_also_when_they_are_not_logged() -> None:
    async with fleet(1) as world:
        Front(world.engine, SchedulerConfig()).log_refused("r", UnreadableMessageError("bad"))
        assert counts(world.engine) == {FaultKind.REQUEST_REFUSED: 1}


async def test_a_journal_that_cannot_be_written_is_counted_and_its_recovery_is_not(tmp_path: Path) -> None:
    async with fleet(1) as world:
        writer = JournalWriter(JournalStore(tmp_path / "journal.sqlite"), world.clock, restart_grace_s=1.0)
        connect(writer, world.engine)
        writer._set_failure(RuntimeError("full"))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        writer._set_failure(None)
        assert counts(world.engine) == {FaultKind.JOURNAL_FAILED: 1}
