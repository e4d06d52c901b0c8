"""Weights of tenants in a plan log: what the fair order depends on besides the calls."""

from __future__ import annotations

from pathlib import Path

from cadenza.v1 import planlog_pb2 as pb
from cadenza_common.serving.plan_log import PlanLogReader
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording import records
from scheduler_svc.recording.recording import recorded_core
from scheduler_svc.replay.core_replay import CoreReplay
from tests.helpers.scheduler.fake_clock import FakeClock, TimedExecutor
from tests.helpers.scheduler.virtual_engine import MODEL


def weight_of(core: Scheduler, tenant: str) -> float:
    return core._requests.policies.order.weight(tenant)


async def test_weights_are_recorded_after_the_header_and_when_they_change(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    with recorded_core(SchedulerConfig(record=path, tenants="tenants.toml")) as (core, record):
        core.set_weights({"gold": 4.0})  # as the service does, before there is an executor
        await record(0, TimedExecutor(FakeClock(), MODEL, 0.01)).describe()
        core.set_weights({"gold": 4.0})
        core.set_weights({"gold": 2.0, "free": 0.5})
        core.set_weights({})
    with PlanLogReader(path) as log:
        replay = CoreReplay(log.header)
        found = []
        for each in log:
            assert replay.make(each) == []
            found.append((dict(each.set_weights.weights), weight_of(replay._core, "gold")))
    assert found == [({"gold": 4.0}, 4.0), ({"gold": 2.0, "free": 0.5}, 2.0), ({}, 1.0)]


def test_logs_of_earlier_versions_have_them_as_an_option() -> None:
    options = {**SchedulerConfig(order="fair").model_dump(), "tenant_weights": "gold=4, free=0.5"}
    del options["tenants"]
    header = records.header(options, MODEL, cadenza_version="0.1.0", started_unix_ns=1).header
    core = CoreReplay(pb.PlanLogHeader.FromString(header.SerializeToString()))._core
    assert [weight_of(core, name) for name in ("gold", "free", "other")] == [4.0, 0.5, 1.0]
