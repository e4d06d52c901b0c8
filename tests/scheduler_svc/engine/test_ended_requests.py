"""An ended request is freed at once, with an executor and without: nothing of it stays in memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.orders import PriorityOrder
from scheduler_svc.core.types import BeamSpec, FinishDetail, RequestSpec, SequenceState
from scheduler_svc.plan_loop.ports import EngineRequest, ModelDescription, SequenceBlockTable, StepRecord
from tests.helpers.scheduler.kept_objects import kept_objects
from tests.helpers.scheduler.virtual_engine import MODEL, STEP_S, World, started

SMALL = replace(MODEL, num_device_blocks=16, num_host_blocks=64)
KINDS = {"one": {}, "samples": {"num_samples": 3}, "beams": {"num_samples": 2, "beams": BeamSpec(3)}}
ENDS_S = 1.0
"""Moment of the deadlines, in seconds since the start."""


def submit(world: World, request_id: str, num_prompt_tokens: int = 20, *, priority: int = 1, **fields: object) -> None:
    """Submit a request whose deadline is at ENDS_S; nothing here refers to it afterwards.

    The first token differs, so that no prompt is a hit of another.
    """
    prompt = (len(request_id), *range(5, 4 + num_prompt_tokens))
    spec = RequestSpec(request_id, prompt, SequenceSampling(), 200, priority=priority, **fields)
    world.engine.submit(EngineRequest(spec, deadline=1.0 + ENDS_S))


async def lose_executor(world: World) -> asyncio.Event:
    """Break the session; the executor comes back when the returned event is set."""
    back = asyncio.Event()

    async def describe() -> ModelDescription:
        await back.wait()
        return world.executor.model

    world.executor.describe = describe  # type: ignore[method-assign]
    assert world.executor.stream is not None
    world.executor.stream.break_off()
    await world.clock.advance(STEP_S)
    assert not world.engine.connected
    return back


async def bring_to(world: World, state: SequenceState, fields: dict[str, object]) -> None:
    """Submit the request "r", and others because of which it is in this state."""
    if state is SequenceState.WAITING:
        submit(world, "long", 230, priority=0)
    submit(world, "r", **fields)
    await world.clock.advance(6 * STEP_S)
    if state is SequenceState.SWAPPED:
        submit(world, "urgent", 230, priority=0)
        await world.clock.advance(6 * STEP_S)
    states = {sequence.state for sequence in world.core.groups["", "r"].sequences}
    assert states == {state}, "the case is what it says"


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("end", [FinishDetail.ABORTED, FinishDetail.DEADLINE], ids=["abort", "deadline"])
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "alone"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", [SequenceState.WAITING, SequenceState.RUNNING, SequenceState.SWAPPED])
async def test_nothing_of_an_ended_request_stays(
    state: SequenceState, kind: str, connected: bool, end: FinishDetail
) -> None:
    async with started(model=SMALL, policies=Policies(order=PriorityOrder(), preemption="swap")) as world:
        with kept_objects() as kept:
            await bring_to(world, state, KINDS[kind])
            assert kept()["RequestSpec"] == len(world.core.groups)
            if not connected:
                await lose_executor(world)
            if end is FinishDetail.DEADLINE:
                await world.clock.advance(ENDS_S)
            else:
                for tenant, request_id in list(world.core.groups):
                    assert world.engine.abort(tenant, request_id)
            if connected:
                # The executor releases the slots, and results of the plans in flight arrive.
                await world.clock.advance(5 * STEP_S)
            assert not world.core.groups
            assert kept() == Counter()
        if connected:
            world.core.check_integrity()


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "alone"])
async def test_requests_that_no_plan_has_seen_leave_nothing(connected: bool) -> None:
    """They are submitted and aborted between two steps: no result follows."""
    async with started() as world:
        if not connected:
            await lose_executor(world)
        with kept_objects() as kept:
            for index in range(100):
                submit(world, str(index))
                world.engine.abort("", str(index))
            assert kept() == Counter()


async def test_finished_requests_leave_nothing() -> None:
    async with started() as world:
        with kept_objects() as kept:
            for index, fields in enumerate(KINDS.values()):
                world.engine.submit(EngineRequest(RequestSpec(str(index), (5, 6, 7), SequenceSampling(), 4, **fields)))  # type: ignore[arg-type]
            await world.clock.advance(20 * STEP_S)
            assert not world.core.groups
            assert kept() == Counter()


async def test_a_hung_executor_keeps_only_the_requests_of_its_plans() -> None:
    async with started() as world:
        with kept_objects() as kept:
            submit(world, "running")
            await world.clock.advance(2 * STEP_S)
            world.executor.step_s = 1e9
            await world.clock.advance(2 * STEP_S)
            for index in range(100):
                submit(world, str(index))
            await world.clock.advance(ENDS_S)
            assert not world.core.groups
            assert kept()["SequenceGroup"] <= MODEL.max_num_seqs


async def records_of(world: World, seconds: float) -> list[StepRecord]:
    """The records of a watch over this time, of which "r" is aborted half way."""
    async with world.engine.watch() as watch:
        submit(world, "r")
        submit(world, "waits", 4090, priority=2)
        world.engine.abort("", "waits")
        await world.clock.advance(seconds / 2)
        world.engine.abort("", "r")
        await world.clock.advance(seconds / 2)
        records: list[StepRecord] = []
        while not records or world.core.groups:
            records += (await anext(watch))[0]
        return records


async def test_a_watch_learns_which_sequences_left() -> None:
    """With the next record, once, and only of sequences that were admitted."""
    async with started() as world:
        records = await records_of(world, 10 * STEP_S)
        (joined,) = [each[0] for record in records for each in record.joined]
        left = [leave for record in records for leave in record.left]
        assert [sequence_id for sequence_id, _ in left] == [joined]
        assert left[0][1] > 1, "its output tokens"


async def test_a_watch_without_an_executor_keeps_no_leaves_of_waiting_requests() -> None:
    async with started() as world, world.engine.watch() as watch:
        back = await lose_executor(world)
        for index in range(100):
            submit(world, str(index))
            world.engine.abort("", str(index))
        back.set()
        await world.clock.advance(ENDS_S / 2)
        assert world.engine.connected
        submit(world, "r")
        await world.clock.advance(4 * STEP_S)
        world.engine.abort("", "r")
        await world.clock.advance(4 * STEP_S)
        records, _ = await anext(watch)
        assert len([leave for record in records for leave in record.left]) == 1


async def test_a_later_watch_learns_nothing_of_earlier_leaves() -> None:
    async with started() as world:
        await records_of(world, 10 * STEP_S)
        submit(world, "unwatched")
        await world.clock.advance(3 * STEP_S)
        world.engine.abort("", "unwatched")
        await world.clock.advance(3 * STEP_S)
        records = await records_of(world, 10 * STEP_S)
        assert len([leave for record in records for leave in record.left]) == 1


async def test_block_tables_of_an_ended_request_are_gone() -> None:
    async with started() as world:
        submit(world, "r")
        await world.clock.advance(3 * STEP_S)
        tables = world.engine.block_tables("", "r")
        assert tables is not None
        assert [type(table) for table in tables] == [SequenceBlockTable]
        world.engine.abort("", "r")
        assert world.engine.block_tables("", "r") is None
