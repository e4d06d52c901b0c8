"""A rank that runs out of memory in a step, before the first exchange or within: no rank hangs, and all begin anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import types_pb2
from executor_svc.config import ExecutorConfig
from executor_svc.cpu.runner import ModelRunner
from executor_svc.device.ranks import RankError
from executor_svc.plan.description import limits_of
from executor_svc.service.convert import plan_from_wire
from executor_svc.worker.step import StepExecutor
from tests.checkpoints import make_llama
from tests.helpers.rank_threads import Connections, Meeting, RankThreads, SharedMemory

PROMPT = list(range(3, 40))


class Replica:
    """Rank 0's executor of a model in two ranks, and the other's."""

    def __init__(self, folder: Path, meeting: Meeting) -> None:
        self.ranks = RankThreads(folder, 2, {"dtype": "float32"}, meeting=meeting)
        members: list[StepExecutor] = []
        self.ranks.prepare = members.append
        first = self.ranks.first
        config = ExecutorConfig(**first.options)
        pools = first.device.new_kv_cache(first.loaded.own_geometry, config)
        limits = limits_of(config, first.loaded.geometry, pools)
        leader = self.ranks.start(config, limits)
        runner = ModelRunner(first.loaded.model, first.device, pools, limits)
        self.executors = [StepExecutor(runner, pools, limits, ranks=leader), *members]

    def step(self) -> list[int]:
        """Run a prompt in a session of its own; return its token."""
        (first, _), last = self.executors, len(PROMPT)
        first.clear()
        sequence = pb.AdmittedSequence(
            token_ids=PROMPT,
            num_prompt_tokens=last,
            block_tables=[pb.BlockTable(block_ids=range(4))],
            sampling=types_pb2.SequenceSampling(),
        )
        scheduled = pb.ScheduledTokens(slots=[0], num_tokens=[last], samples=[True])
        plan = pb.StepPlan(step_id=1, epoch=1, admitted=[sequence], scheduled=scheduled)
        return first.execute(plan_from_wire(plan), 0).token_ids.tolist()


@pytest.fixture(scope="module", params=[SharedMemory, Connections])
def replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    meeting = request.param()
    made = Replica(make_llama(tmp_path_factory.mktemp("model")), meeting)
    yield made
    made.ranks.stop()
    meeting.close()


@contextmanager
def without_memory(target: object, method: str) -> Iterator[None]:
    """A method that cannot allocate."""

    def fails(*_: object) -> None:
        raise MemoryError("no memory left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, method, fails)
        yield


@pytest.mark.parametrize("rank", [0, 1])
def test_before_the_first_exchange_no_rank_computes(replica: Replica, rank: int) -> None:
    expected = replica.step()
    kinds = (MemoryError, "no memory left") if rank == 0 else (RankError, "rank 1: MemoryError: no memory left")
    with without_memory(replica.executors[rank].slots, "schedule"), pytest.raises(kinds[0], match=kinds[1]):
        replica.step()
    assert replica.step() == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_within_the_computation_the_others_are_released(replica: Replica, rank: int) -> None:
    """Rank 1 has no memory when rank 0 waits for it; or rank 0 when rank 1 does."""
    expected = replica.step()
    kinds = (MemoryError, "no memory left") if rank == 0 else (RankError, "rank 1 failed")
    with without_memory(replica.executors[rank]._runner, "forward"), pytest.raises(kinds[0], match=kinds[1]):
        replica.step()
    assert replica.step() == expected
