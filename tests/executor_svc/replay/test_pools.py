"""A replay's pools have the pages that the log says, also where no option gives them."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1.planlog_pb2 import PlanLogRecord, SessionOpenedCall
from executor_svc.app import build_executor
from executor_svc.config import ExecutorConfig
from executor_svc.plan.description import Description
from executor_svc.replay import plan_replay
from executor_svc.service.description import description_to_wire
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> pb.DescribeResponse:
    """Of a model with recurrent layers: blocks of several pages, and states beside them."""
    described: Future[Description] = Future()
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("model"), "lfm2")
    config = ExecutorConfig(model=str(folder), num_gpu_blocks=9, num_cpu_blocks=2, max_num_seqs=6, dtype="float32")
    build_executor(config, described)
    return description_to_wire(described.result())


@pytest.mark.parametrize("simulate", [(), ("--simulate=instant",)], ids=["model", "simulated"])
def test_a_pool_of_memorys_size_has_the_recorded_pages(
    recorded: pb.DescribeResponse, simulate: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One page more than blocks and states take, and less than all states: neither is what options can say."""
    here: list[pb.DescribeResponse] = []

    class Seen(plan_replay._Executor):
        def __init__(self, config: ExecutorConfig) -> None:
            super().__init__(config)
            here.append(self.description)

    monkeypatch.setattr(plan_replay, "_Executor", Seen)
    states = recorded.kv.state.pages_per_state * recorded.limits.max_num_seqs
    assert recorded.kv.num_device_blocks > states > 5
    for num_pages in (recorded.kv.num_device_blocks, recorded.kv.num_device_blocks + 1, states - 1):
        log = pb.DescribeResponse()
        log.CopyFrom(recorded)
        log.kv.num_device_blocks = num_pages
        replay = plan_replay.PlanReplay("log", log, simulate, executor_id=0)
        assert replay.replay_record(PlanLogRecord(session_opened=SessionOpenedCall(epoch=1, incarnation=3))) == ""
        replay.stop()
        assert here[-1].kv.num_device_blocks == num_pages
        assert here[-1].kv.num_host_blocks == recorded.kv.num_host_blocks
        assert list(here[-1].kv.groups) == list(recorded.kv.groups)
