"""Joins and ends of a step are handled together; what comes of them is the same as one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cadenza_common.plan.result import StepResult
from cadenza_common.plan.sampling import SequenceSampling
from cadenza_common.plan_wire.writing import plan_to_wire
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.steps import admission
from scheduler_svc.core.types import ExecutorSpec, Finish, FinishDetail, RequestSpec, SequenceState
from tests.helpers.core.core_bench import Bench
from tests.helpers.core.deltas import deltas

NUM_STEPS = 120
STOP_IDS = (2, 5)


def spec_of(rng: random.Random, name: str, *, alone: bool) -> RequestSpec:
    """A request with a prompt that others may begin with too."""
    prompt = (7,) * rng.randrange(13) + tuple(rng.choices(range(3, 30), k=rng.randrange(1, 12)))
    sampling = SequenceSampling(seed=len(name), stop_token_ids=rng.choice([STOP_IDS, STOP_IDS[:1], ()]))
    num_samples = 1 if alone else rng.choice([1, 1, 3])
    max_tokens = rng.choice([None, 1, 2, 9])
    return RequestSpec(name, prompt, sampling, max_tokens, frozenset({2}), num_samples=num_samples)


def apply_oldest(core: Scheduler, rng: random.Random) -> str:
    """Apply a random result to the oldest plan; finished sequences may have no token."""
    lane = core.lanes[0]
    step = lane.inflight[0]
    slots = [
        slot
        for slot in step.sampling_slots
        if (sequence := lane.sequence_at[slot]) is not None
        and (sequence.state is not SequenceState.FINISHED or rng.random() < 0.5)
    ]
    token_ids = rng.choices(range(2, 12), k=len(slots))
    _, outputs = core.apply_result(0, StepResult(step.plan.step_id, slots=slots, token_ids=token_ids), 0.0)
    return repr([(delta.key, delta.sample_index, delta.token_ids, delta.finish) for delta in deltas(outputs)])


def history(seed: int, *, prefix_caching: bool) -> list[str]:
    """The plans and outputs of a load on a small pool, and the order in which sequences finished."""
    rng = random.Random(seed)
    core = Scheduler(Policies(prefix_caching=prefix_caching))
    core.add_executor(0, ExecutorSpec(4, rng.choice([50, 90]), 24, 12, rng.choice([32, 96]), 60, watermark=0.05))
    found: list[str] = []
    for number in range(NUM_STEPS):
        for index in range(rng.choice([0, 0, 1, 2, 6])):
            core.add_request(spec_of(rng, f"{number}.{index}", alone=seed % 2 == 0), 0.0)
        plan = core.plan_step(0, 0.0)
        found.append("" if plan is None else plan_to_wire(plan, 1).SerializeToString().hex())
        if len(core.lanes[0].inflight) == 2 or (plan is None and core.lanes[0].inflight):
            found.append(apply_oldest(core, rng))
            found.append(repr([sequence.sequence_id for sequence in core.take_finished()]))
        core.check_integrity()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_plans_and_outputs_are_as_one_by_one(seed: int, prefix_caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"starts": 0, "ends": 0}
    start_all, finish_all = Lane.start_all, Lane.finish_all

    def count_starts(lane: Lane, sequences: list[Sequence]) -> list[int]:
        counts["starts"] += len(sequences)
        return start_all(lane, sequences)

    def count_ends(lane: Lane, sequences: list[Sequence]) -> None:
        counts["ends"] += len(sequences)
        finish_all(lane, sequences)

    monkeypatch.setattr(Lane, "start_all", count_starts)
    monkeypatch.setattr(Lane, "finish_all", count_ends)
    together = history(seed, prefix_caching=prefix_caching)
    assert min(counts.values()) > 5, "the load has few joins and ends"

    def finish_each(requests: RequestTable, lane: Lane, finishes: dict[Sequence, Finish]) -> None:
        for sequence, finish in finishes.items():
            requests.finish(sequence, finish)

    monkeypatch.setattr(admission, "admit_new", lambda *args: 0)
    monkeypatch.setattr(RequestTable, "finish_all", finish_each)
    former = dict(counts)
    assert history(seed, prefix_caching=prefix_caching) == together
    assert counts == former


def test_a_request_that_a_smaller_executor_looked_at_has_its_whole_length() -> None:
    """The other executor's limit of length counts only while the sequence is there."""
    bench = Bench(num_blocks=64, max_num_batched_tokens=64)
    small = replace(bench.spec, max_model_len=40, num_blocks=10)
    bench.add("large", 36, 1)
    bench.add("waits", 20, 60)
    for spec in (small, bench.spec):
        bench.core.executor_lost(0, 0.0)
        bench.core.add_executor(0, spec)
        bench.core.session_opened(0)
        if spec is small:
            assert (plan := bench.core.plan_step(0, 0.0)) is not None
            assert len(plan.admitted) == 1, "the pool is full"
    bench.core.abort(("", "large"), FinishDetail.ABORTED)
    bench.run()
    assert len(bench.tokens["waits"]) == 60
