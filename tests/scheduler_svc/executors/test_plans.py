"""Plans onto the wire, whole and read back by the executor; descriptions off it, and what a lane makes of them."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import pytest

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import types_pb2
from cadenza_common.plan.plan import AdmittedSequence, BlockMoves, StateSaves, StepPlan
from cadenza_common.plan_wire.reading import plan_from_wire
from cadenza_common.plan_wire.writing import plan_to_wire
from executor_svc.config import ExecutorConfig
from executor_svc.service.description import description_to_wire
from executor_svc.simulated.build import build_simulated
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.executors.convert import model_description
from scheduler_svc.plan_loop.fleet_model import executor_spec
from scheduler_svc.plan_loop.ports import ModelDescription
from tests.helpers.core.core_sampling import core_sampling

FIELDS: dict[str, dict[str, Any]] = {
    "swapped out": {"swap_out": BlockMoves([3, 5], [1, 0])},
    "copied": {"copies": BlockMoves([7, 7], [8, 9])},
    "swapped in": {"swap_in": BlockMoves([2], [6])},
    "appended": {"append_slots": [1, 1], "append_block_ids": [4, 5]},
    "given": {"given_slots": [4, 0], "given_token_ids": [0, 99]},
    "forks": {"fork_source_slots": [2, 2], "fork_slots": [3, 0]},
    "debug_digest": {"debug_digest": True},
    "state_saves": {"state_saves": StateSaves([4, 4], [8, 16], [1, 2, 9, 3, 5, 7])},
    "held": {"held_slots": [0, 3], "resumed_slots": [2]},
}
"""Fields of a plan, the same in the scheduler and in the executor that reads them."""


def sent(**fields: Any) -> bytes:
    return plan_to_wire(StepPlan(step_id=7, executor_id=0, **fields), epoch=9).SerializeToString()


def received(message: bytes) -> dict[str, Any]:
    """What the executor reads, in plain lists."""
    plan = plan_from_wire(pb.StepPlan.FromString(message))
    assert not plan.reserved
    found = {}
    assert pb.StepPlan.FromString(plan.wire()) == pb.StepPlan.FromString(message)
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, BlockMoves):
            value = BlockMoves(list(value.sources), list(value.destinations))
        if isinstance(value, StateSaves):
            value = StateSaves(list(value.slots), list(value.positions), list(value.page_ids))
        if field.compare:
            found[field.name] = list(value) if isinstance(value, array) else value
    return found


NOTHING = received(sent())


def test_absent_parts_are_not_read() -> None:
    """Most steps only decode: their plans cost no buffers for the parts that they lack."""
    plan = plan_from_wire(pb.StepPlan.FromString(sent(decode_ready=True)))
    assert plan == StepPlan(step_id=7, epoch=9, decode_ready=True)
    assert not any(isinstance(getattr(plan, field.name), array) for field in dataclasses.fields(plan))


@pytest.mark.parametrize("name", FIELDS)
def test_each_part_arrives_and_nothing_else_does(name: str) -> None:
    assert received(sent(**FIELDS[name])) == NOTHING | FIELDS[name]


def test_all_parts_arrive_together() -> None:
    fields = {key: value for fields in FIELDS.values() for key, value in fields.items()}
    fields |= {"scheduled_slots": [5], "scheduled_num_tokens": [17], "scheduled_samples": [True], "decode_ready": True}
    fields |= {"released_slots": [6]}
    assert received(sent(**fields)) == NOTHING | fields


def test_a_decode_step_is_a_step_id_an_epoch_and_a_flag() -> None:
    assert sent(decode_ready=True) == pb.StepPlan(step_id=7, epoch=9, decode_ready=True).SerializeToString()
    assert len(sent(decode_ready=True)) == 6


def test_candidates_are_requested_at_admission() -> None:
    def admitted(**sampling: Any) -> bytes:
        sequence = AdmittedSequence(3, (5, 6, 7), 2, 1, (4,), core_sampling(**sampling), sample_index=2)
        return sent(admitted=[sequence])

    (asking,) = plan_from_wire(pb.StepPlan.FromString(admitted(num_candidates=8))).admitted
    assert asking.sampling.num_candidates == 8
    assert (asking.slot, asking.token_ids.tolist(), asking.num_prompt_tokens) == (3, [5, 6, 7], 2)
    assert (asking.num_computed_tokens, asking.block_ids.tolist()) == (1, [4])
    (plain,) = plan_from_wire(pb.StepPlan.FromString(admitted())).admitted
    assert plain.sampling.num_candidates == 0
    assert len(admitted(num_candidates=8)) > len(admitted())


# ---------------------------------------------------------------- descriptions


def described(**options: Any) -> pb.DescribeResponse:
    config = ExecutorConfig(simulate="instant", num_gpu_blocks=20, **options)
    return description_to_wire(build_simulated(config)[1])


def test_the_simulated_executor_does_all_that_its_pools_allow() -> None:
    message = described(num_cpu_blocks=6)
    model = model_description(message)
    assert (model.num_device_blocks, model.num_host_blocks) == (20, 6)
    assert model.bytes_per_block == message.kv.bytes_per_block > 0
    assert model.can_swap
    assert model.shares_prefixes
    assert model.can_copy
    assert model.can_fork
    assert model.gives_candidates
    assert model.gives_debug_digest
    assert list(message.features) == sorted(set(message.features))
    assert not model_description(described()).can_swap, "there is no host pool"


def test_the_fingerprint_is_read_in_parts() -> None:
    message = described()
    model = model_description(message)
    assert model.is_exact
    assert dict(model.numerics) == {
        "mode": "exact",
        "weights": message.fingerprint.weights_digest.hex()[:12],
        "dtype": "uint64",
        "kv_dtype": "uint64",
        "kernels": message.fingerprint.kernels,
        "isa": "any",
        "threads": "1",
        "versions": message.fingerprint.versions[0],
        "digest": message.fingerprint.digest.hex()[:12],
    }
    message.fingerprint.mode = types_pb2.NUMERICS_MODE_FAST
    fast = model_description(message)
    assert not fast.is_exact
    assert fast.fingerprint != model.fingerprint
    message.fingerprint.mode = 99  # type: ignore[assignment]  # of a newer executor
    assert dict(model_description(message).numerics)["mode"] == "99"


@pytest.mark.parametrize(
    ("feature", "field"),
    [
        (pb.EXECUTOR_FEATURE_PROMPT_LOGPROBS, "gives_prompt_logprobs"),
        (pb.EXECUTOR_FEATURE_LOGITS_PROCESSORS, "has_logits_processors"),
        (pb.EXECUTOR_FEATURE_BLOCK_COPY, "can_copy"),
        (pb.EXECUTOR_FEATURE_SWAP, "can_swap"),
        (pb.EXECUTOR_FEATURE_SAMPLE_FORK, "can_fork"),
        (pb.EXECUTOR_FEATURE_BEAMS, "gives_candidates"),
        (pb.EXECUTOR_FEATURE_DEBUG_DIGEST, "gives_debug_digest"),
        (pb.EXECUTOR_FEATURE_SHARED_PREFIXES, "shares_prefixes"),
    ],
)
def test_what_is_not_announced_is_not_there(feature: pb.ExecutorFeature.ValueType, field: str) -> None:
    message = described(num_cpu_blocks=6)
    whole = model_description(message)
    message.features.remove(feature)
    assert getattr(whole, field)
    assert model_description(message) == dataclasses.replace(whole, **{field: False})


def narrowed(**changes: Any) -> tuple[ModelDescription, Any]:
    model = dataclasses.replace(model_description(described(num_cpu_blocks=6)), **changes)
    return model, executor_spec(model, SchedulerConfig(executor="127.0.0.1:1"))


def test_a_lane_knows_host_pool_block_size_and_sharing() -> None:
    _, spec = narrowed()
    assert (spec.num_host_blocks, spec.shares_prefixes) == (6, True)
    assert narrowed(shares_prefixes=False)[1] == dataclasses.replace(spec, shares_prefixes=False)
    assert narrowed(can_swap=False)[1] == dataclasses.replace(spec, num_host_blocks=0)
