"""A rank that runs out of memory in a step, or that has other slots: no rank hangs or computes, and all begin anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import types_pb2
from cadenza_common.plan_wire.reading import plan_from_bytes, plan_from_wire
from executor_svc.batch.step_result import SampledTokens
from executor_svc.config import ExecutorConfig
from executor_svc.cpu.runner import ModelRunner
from executor_svc.device.ranks import RankError
from executor_svc.plan.description import limits_of
from executor_svc.startup import member
from executor_svc.worker.step import StepExecutor
from tests.checkpoints import make_llama
from tests.helpers.executor.rank_threads import Connections, Meeting, RankThreads, SharedMemory

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
        first, last = self.executors[0], len(PROMPT)
        first.clear()
        sequence = pb.AdmittedSequence(
            token_ids=PROMPT,
            num_prompt_tokens=last,
            block_tables=[pb.BlockTable(block_ids=range(4))],
            sampling=types_pb2.SequenceSampling(),
        )
        scheduled = pb.ScheduledTokens(slots=[0], num_tokens=[last], samples=[True])
        return self._run(pb.StepPlan(step_id=1, epoch=1, admitted=[sequence], scheduled=scheduled))

    def two_steps(self) -> list[int]:
        """Run the prompt, then a step that reads its token; return both tokens."""
        return self.step() + self._run(pb.StepPlan(step_id=2, epoch=1, decode_ready=True))

    def _run(self, plan: pb.StepPlan) -> list[int]:
        return self.executors[0].execute(plan_from_wire(plan), 0).token_ids.tolist()


@pytest.fixture(scope="module", params=[SharedMemory, Connections])
def replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    meeting = request.param()
    made = Replica(make_llama(tmp_path_factory.mktemp("model")), meeting)
    yield made
    made.ranks.stop()
    meeting.close()


def no_memory(*_: object) -> None:
    raise MemoryError("no memory left")


@contextmanager
def replaced(target: object, method: str, other: Callable[..., Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, method, other)
        yield


@pytest.mark.parametrize("rank", [0, 1])
def test_before_the_first_exchange_no_rank_computes(replica: Replica, rank: int) -> None:
    expected = replica.step()
    kinds = (MemoryError, "no memory left") if rank == 0 else (RankError, "rank 1: MemoryError: no memory left")
    with replaced(replica.executors[rank].slots, "schedule", no_memory), pytest.raises(kinds[0], match=kinds[1]):
        replica.step()
    assert replica.step() == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_within_the_computation_the_others_are_released(replica: Replica, rank: int) -> None:
    """Rank 1 has no memory when rank 0 waits for it; or rank 0 when rank 1 does."""
    expected = replica.step()
    kinds = (MemoryError, "no memory left") if rank == 0 else (RankError, "rank 1 failed")
    with replaced(replica.executors[rank]._runner, "forward", no_memory), pytest.raises(kinds[0], match=kinds[1]):
        replica.step()
    assert replica.step() == expected


def test_a_plan_that_a_rank_cannot_even_read_is_refused(replica: Replica) -> None:
    """Rank 0 waits for its word, and gets it."""
    expected = replica.step()
    wanted = pytest.raises(RankError, match="rank 1: MemoryError: no memory left")
    with replaced(member, "plan_from_bytes", no_memory), wanted:
        replica.step()
    assert replica.step() == expected


def another_token(replica: Replica) -> tuple[object, str, Callable[..., Any]]:
    """Rank 1 takes note of another token than the one that was sampled."""
    ranks = replica.executors[1]._ranks
    sampled = ranks.sampled

    def other(sample: Any) -> SampledTokens:
        found = sampled(sample)
        return replace(found, token_ids=found.token_ids + 1)

    return ranks, "sampled", other


def another_block(replica: Replica) -> tuple[object, str, Callable[..., Any]]:
    """Rank 1 has a block of the sequence elsewhere."""
    slots = replica.executors[1].slots
    admit = slots._admit
    blocks = np.array([0, 1, 3, 2])
    return slots, "_admit", lambda sequence: admit(replace(sequence, block_ids=blocks))


@pytest.mark.parametrize("differs", [another_token, another_block])
def test_ranks_whose_slots_differ_compute_nothing(replica: Replica, differs: Callable[..., Any]) -> None:
    """Their counts are equal: it is the contents that differ."""
    expected = replica.two_steps()
    with replaced(*differs(replica)), pytest.raises(RankError, match="rank 1 has other slots than rank 0"):
        replica.two_steps()
    assert replica.two_steps() == expected


def test_ranks_with_different_plans_compute_nothing(replica: Replica) -> None:
    other = pb.StepPlan(step_id=1, epoch=2).SerializeToString()
    expected = replica.step()
    wanted = pytest.raises(RankError, match="rank 1 has another plan than rank 0")
    with replaced(member, "plan_from_bytes", lambda wire: plan_from_bytes(wire + other)), wanted:
        replica.step()
    assert replica.step() == expected
