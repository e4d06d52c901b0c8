"""Results and descriptions as no executor should send them: the scheduler refuses them by its own errors."""

from __future__ import annotations

from collections import defaultdict

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import types_pb2
from cadenza_common.plan.errors import ProtocolError
from cadenza_common.plan_wire.results import result_from_wire
from cadenza_common.plan_wire.writing import plan_to_wire
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import BeamSpec, ExecutorSpec, RequestSpec
from scheduler_svc.executors.convert import model_description
from tests.fuzz.wire.messages import any_message, damaged, mixed, near
from tests.helpers.core.core_executor import CoreExecutor
from tests.helpers.core.core_sampling import core_sampling
from tests.helpers.core.deltas import deltas
from tests.helpers.core.known import known_sample

VOCAB = 50
SPEC = ExecutorSpec(8, 40, 10, 8, 64, 64)
DRAFTING = ExecutorSpec(8, 40, 32, 30, 64, 64, max_drafts=3)
SPECS = [SPEC, DRAFTING]
REQUESTS = [
    RequestSpec("greedy", (1, 2, 3), core_sampling(), max_tokens=8),
    RequestSpec("logprobs", (4,) * 9, core_sampling(num_logprobs=2, num_prompt_logprobs=1), max_tokens=8),
    RequestSpec("samples", (5, 6), core_sampling(temperature=1.0, seed=1), max_tokens=8, num_samples=2),
    RequestSpec("no drafts", (9, 9), core_sampling(temperature=1.0, seed=2), max_tokens=8, max_drafts=0),
    RequestSpec(
        "beams", (7, 8), core_sampling(num_candidates=4), max_tokens=5, beams=BeamSpec(2, 1.0, early_stopping=False)
    ),
]
NUM_STEPS = 3
COLUMNS = types_pb2.LogprobColumns(chosen_logprobs=[-1.0], chosen_ranks=[1])
DESCRIPTION = pb.DescribeResponse(
    protocol_version=1,
    incarnation=5,
    model=pb.ModelGeometry(name="toy", vocab_size=VOCAB, max_model_len=64),
    kv=pb.KvGeometry(block_size=8, num_device_blocks=40, num_groups=1),
    limits=pb.ExecutorLimits(
        num_slots=10, max_num_seqs=8, max_num_batched_tokens=64, max_logprobs=20, max_inflight_plans=4
    ),
)


class World:
    """A core after some steps, and the true result of the next one."""

    def __init__(self, spec: ExecutorSpec, num_steps: int) -> None:
        self.core = Scheduler()
        self.core.add_executor(0, spec)
        self.executor = CoreExecutor(spec, VOCAB)
        self.tokens: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        """By request and sample, without beams."""
        for request in REQUESTS:
            self.core.add_request(request, 0.0)
        for _ in range(num_steps):
            assert self.apply(self.next_result().SerializeToString()) is not None

    def next_result(self) -> pb.StepResult:
        """Plan and run a step."""
        plan = self.core.plan_step(0, 0.0)
        assert plan is not None
        return self.executor.run_on_wire(plan_to_wire(plan, 1))

    def apply(self, payload: bytes) -> StepOutputs | None:
        """Apply a result as the plan loop does; None if it is refused."""
        try:
            outputs = self.core.apply_result(0, result_from_wire(pb.StepResult.FromString(payload)), 0.0)[1]
        except (DecodeError, ProtocolError, InvariantError) as error:
            self.refusal = str(error)
            return None
        for delta in deltas(outputs):
            self.tokens[delta.key[1], delta.sample_index] += delta.token_ids
        return outputs

    def ends_well(self) -> None:
        """Once the session is lost, every request ends with the tokens of its own."""
        self.core.executor_lost(0, 0.0)
        self.executor.clear()
        self.core.check_integrity()
        for _ in range(60):
            if not self.core.groups:
                break
            assert self.apply(self.next_result().SerializeToString()) is not None
        assert not self.core.groups
        for request in REQUESTS:
            for index in range(0 if request.beams else request.num_samples):
                assert self.tokens[request.request_id, index] == known_sample(request, 64, index)[0]


BASES = [
    (spec, num_steps, World(spec, num_steps).next_result().SerializeToString())
    for spec in SPECS
    for num_steps in range(NUM_STEPS)
]
COUNTS = ("num_tokens", "num_drafts", "num_accepted")
few = settings(max_examples=40)


def miscounted(base: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    """A result with other counts of tokens, drafts and accepted drafts, and as many token ids as they say."""
    result = pb.StepResult.FromString(base)
    num_slots = len(result.slots)
    columns = {name: list(getattr(result, name)) or [int(name == "num_tokens")] * num_slots for name in COUNTS}
    for name, place, count in changes:
        columns[name][place % num_slots] = count
    num_tokens = sum(columns["num_tokens"])
    token_ids = ([*result.token_ids] + [7] * min(num_tokens, 100))[: min(num_tokens, 100)]
    for name, column in (*columns.items(), ("token_ids", token_ids)):
        result.ClearField(name)
        getattr(result, name).extend(column)
    return result.SerializeToString()


def results() -> st.SearchStrategy[tuple[ExecutorSpec, int, bytes]]:
    """Limits, a number of steps, and a result of the next one that is nearly right."""
    drawn = any_message(pb.StepResult.DESCRIPTOR)
    count = st.tuples(st.sampled_from(COUNTS), st.integers(0, 9), st.sampled_from([0, 1, 2, 3, 4, 5, 2**31, 2**32 - 1]))

    def of(base: bytes) -> st.SearchStrategy[bytes]:
        changed = near(base, pb.StepResult.DESCRIPTOR)
        counted = st.builds(miscounted, st.just(base), st.lists(count, min_size=1, max_size=3))
        return mixed((4, changed), (2, damaged(st.just(base))), (2, damaged(changed)), (4, counted), (1, drawn))

    return st.sampled_from(BASES).flatmap(lambda each: st.tuples(st.just(each[0]), st.just(each[1]), of(each[2])))


@few
@given(results())
def test_any_result_is_refused_or_leaves_the_core_whole(drawn: tuple[ExecutorSpec, int, bytes]) -> None:
    """And once the session is lost, every request ends with the tokens of its own."""
    spec, num_steps, payload = drawn
    world = World(spec, num_steps)
    world.next_result()
    accepted = world.apply(payload)
    world.core.check_integrity()
    if accepted is None:
        world.ends_well()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": 6, "num_drafts": 5, "num_accepted": 5}, "slot 0 gave 6 tokens, with 5 of 5 drafts accepted"),
        ({"num_tokens": 2, "num_drafts": 0, "num_accepted": 0}, "slot 0 gave 2 tokens, with 0 of 0 drafts accepted"),
        ({"num_tokens": 2, "num_drafts": 1, "num_accepted": 2}, "2 of 1 drafts accepted, where 3 were allowed"),
        ({"num_tokens": 1, "num_drafts": 4, "num_accepted": 0}, "0 of 4 drafts accepted, where 3 were allowed"),
        ({"num_tokens": 1, "num_drafts": 3, "num_accepted": 3}, "slot 0 gave 1 tokens, with 3 of 3 drafts accepted"),
        ({"num_drafts": 2**32 - 1}, "where 3 were allowed"),
    ],
)
def test_counts_beyond_the_plan_are_refused_by_name(changes: dict[str, int], message: str) -> None:
    """The other requests of the lane lose nothing."""
    world = World(DRAFTING, 2)
    payload = world.next_result().SerializeToString()
    assert world.apply(miscounted(payload, [(name, 0, count) for name, count in changes.items()])) is None
    assert message in world.refusal
    world.ends_well()


def test_drafts_of_an_executor_that_has_none_are_refused() -> None:
    world = World(SPEC, 2)
    payload = world.next_result().SerializeToString()
    assert world.apply(miscounted(payload, [("num_drafts", 1, 1)])) is None
    assert "0 of 1 drafts accepted, where 0 were allowed" in world.refusal
    world.ends_well()


def test_logprobs_of_a_slot_that_does_not_sample_are_refused() -> None:
    world = World(SPEC, 0)
    result = world.next_result()
    result.logprobs.add(slot=SPEC.num_slots + 1, columns=COLUMNS)
    assert world.apply(result.SerializeToString()) is None


@few
@given(mixed((3, near(DESCRIPTION.SerializeToString(), pb.DescribeResponse.DESCRIPTOR)), (1, damaged(st.just(b"")))))
def test_any_description_is_refused_or_can_be_served(payload: bytes) -> None:
    try:
        model = model_description(pb.DescribeResponse.FromString(payload))
    except (DecodeError, ProtocolError):
        return
    counts = (model.vocab_size, model.max_model_len, model.block_size, model.num_device_blocks)
    assert min(*counts, model.num_slots, model.max_num_seqs, model.max_num_batched_tokens) > 0
    assert model.max_inflight_plans > 0
