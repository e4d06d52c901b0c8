"""The table of gauges: the types with a field for each of its rows, and the metric families that show a row."""

from __future__ import annotations

from dataclasses import fields

from cadenza.info import ExecutorInfo, ServerLoad
from cadenza.v1 import generation_pb2 as pb
from scheduler_svc.plan_loop.gauges import GAUGES
from tests.helpers.scheduler.changing_executor import STEP_S
from tests.helpers.scheduler.fleet_world import fleet
from tests.helpers.scheduler.scraped import samples

NAMES = {gauge.name for gauge in GAUGES}
OF_THE_FRONT = {"num_client_tasks"}


def names(type_: type) -> set[str]:
    return {field.name for field in fields(type_)}


def test_a_gauge_is_a_row_and_a_field_of_each_type() -> None:
    assert set(pb.SchedulerLoad.DESCRIPTOR.fields_by_name) == NAMES | OF_THE_FRONT
    assert names(ServerLoad) == NAMES | OF_THE_FRONT
    of_executors = set(pb.ExecutorInfo.DESCRIPTOR.fields_by_name)
    assert names(ExecutorInfo) == of_executors
    assert len(of_executors & NAMES) == 12


async def test_the_families_of_a_row_show_its_gauge() -> None:
    async with fleet() as world:
        world.submit_mix()
        await world.clock.advance(8.5 * STEP_S)
        load, states, found = world.engine.load(), world.engine.executor_infos(), samples(world.engine)
        assert len(states) == 2
        assert min(load.num_running, load.num_stored_tokens, load.num_output_tokens, load.num_prefix_queries) > 0
        for gauge in GAUGES:
            of_each = {state.target: getattr(state.load, gauge.name) for state in states}
            for name in gauge.families:
                if name.startswith("cadenza_lane_"):
                    assert {sample.labels["executor"]: sample.value for sample in found[name]} == of_each
                else:
                    assert [sample.value for sample in found[name]] == [getattr(load, gauge.name)]


async def test_counts_of_executors_stay_when_they_are_removed() -> None:
    async with fleet() as world:
        world.submit_mix()
        await world.run()
        await world.engine.executors.drain("e:0", 1.0)
        await world.engine.executors.remove("e:0")
        for gauge in GAUGES:
            for name in gauge.families:
                if name.startswith("cadenza_lane_"):
                    seen = {sample.labels["executor"] for sample in samples(world.engine)[name]}
                    assert seen == ({"e:1"} if gauge.of_counts is None else {"e:0", "e:1"})
