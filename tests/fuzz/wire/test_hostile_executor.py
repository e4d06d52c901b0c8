"""Results and descriptions as no executor should send them: the scheduler refuses them by its own errors."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import types_pb2
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import BeamSpec, ExecutorSpec, RequestSpec
from scheduler_svc.executors.convert import ProtocolError, model_description, step_plan
from scheduler_svc.executors.results import step_result
from tests.fuzz.wire.messages import any_message, damaged, mixed, near
from tests.helpers.core_executor import CoreExecutor
from tests.helpers.core_sampling import core_sampling

VOCAB = 50
SPEC = ExecutorSpec(8, 40, 10, 8, 64, 64)
REQUESTS = [
    RequestSpec("greedy", (1, 2, 3), core_sampling(), max_tokens=5),
    RequestSpec("logprobs", (4,) * 9, core_sampling(num_logprobs=2, num_prompt_logprobs=1), max_tokens=5),
    RequestSpec("samples", (5, 6), core_sampling(temperature=1.0, seed=1), max_tokens=5, num_samples=2),
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

    def __init__(self, num_steps: int) -> None:
        self.core = Scheduler()
        self.core.add_executor(0, SPEC)
        self.executor = CoreExecutor(SPEC, VOCAB)
        for request in REQUESTS:
            self.core.add_request(request, 0.0)
        for _ in range(num_steps):
            self.core.apply_result(0, step_result(self.next_result()), 0.0)

    def next_result(self) -> pb.StepResult:
        """Plan and run a step."""
        plan = self.core.plan_step(0, 0.0)
        assert plan is not None
        return self.executor.run_on_wire(step_plan(plan, 1))

    def apply(self, payload: bytes) -> StepOutputs | None:
        """Apply a result as the plan loop does; None if it is refused."""
        try:
            return self.core.apply_result(0, step_result(pb.StepResult.FromString(payload)), 0.0)[1]
        except (DecodeError, ProtocolError, InvariantError):
            return None


BASES = [World(num_steps).next_result().SerializeToString() for num_steps in range(NUM_STEPS)]
few = settings(max_examples=80)


def results() -> st.SearchStrategy[tuple[int, bytes]]:
    """A number of steps, and a result of the next one that is nearly right."""
    drawn = any_message(pb.StepResult.DESCRIPTOR)

    def of(num_steps: int) -> st.SearchStrategy[bytes]:
        base = BASES[num_steps]
        changed = near(base, pb.StepResult.DESCRIPTOR)
        return mixed((4, changed), (2, damaged(st.just(base))), (2, damaged(changed)), (1, drawn))

    return st.sampled_from(range(NUM_STEPS)).flatmap(lambda each: st.tuples(st.just(each), of(each)))


@few
@given(results())
def test_any_result_is_refused_or_leaves_the_core_whole(drawn: tuple[int, bytes]) -> None:
    """And once the session is lost, every request ends with the tokens of its own."""
    num_steps, payload = drawn
    world = World(num_steps)
    world.next_result()
    accepted = world.apply(payload)
    world.core.check_integrity()
    if accepted is not None:
        return
    world.core.executor_lost(0, 0.0)
    world.executor.clear()
    world.core.check_integrity()
    for _ in range(40):
        if not world.core.groups:
            break
        assert world.apply(world.next_result().SerializeToString()) is not None
    assert not world.core.groups


def test_logprobs_of_a_slot_that_does_not_sample_are_refused() -> None:
    world = World(0)
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
