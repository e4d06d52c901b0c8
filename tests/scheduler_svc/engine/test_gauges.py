"""The table of gauges, and the four types that have a field for each of its rows."""

from __future__ import annotations

from dataclasses import fields

from cadenza.info import ExecutorInfo, ServerLoad
from cadenza.v1 import generation_pb2 as pb
from scheduler_svc.engine.gauges import GAUGES
from scheduler_svc.plan_loop.ports import Load

NAMES = {gauge.name for gauge in GAUGES}
OF_THE_FRONT = {"num_client_tasks"}
ALWAYS_ZERO = {"num_fragmented_slots"}


def names(type_: type) -> set[str]:
    return {field.name for field in fields(type_)}


def test_a_gauge_is_a_row_and_a_field_of_each_type() -> None:
    assert len(NAMES) == len(GAUGES)
    assert names(Load) == NAMES
    assert set(pb.SchedulerLoad.DESCRIPTOR.fields_by_name) == NAMES | OF_THE_FRONT | ALWAYS_ZERO
    assert names(ServerLoad) == NAMES | OF_THE_FRONT | ALWAYS_ZERO
    of_executors = set(pb.ExecutorInfo.DESCRIPTOR.fields_by_name)
    assert names(ExecutorInfo) == of_executors
    assert len(of_executors & NAMES) == 12
