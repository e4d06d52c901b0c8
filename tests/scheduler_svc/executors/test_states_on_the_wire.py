"""Recurrent states on the wire: pages of an admission, copies to make, copies made, and the size of a state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cadenza.v1 import execution_pb2 as pb
from cadenza_common.plan.errors import InvalidPlan, ProtocolError
from cadenza_common.plan.memory import MemoryPart
from cadenza_common.plan.plan import AdmittedSequence, StepPlan
from cadenza_common.plan.result import StepResult
from cadenza_common.plan.sampling import SequenceSampling
from cadenza_common.plan_wire.reading import plan_from_wire
from cadenza_common.plan_wire.results import result_from_wire, result_to_wire
from cadenza_common.plan_wire.writing import plan_to_wire
from executor_svc.config import ExecutorConfig
from executor_svc.service.description import description_to_wire
from executor_svc.simulated.build import build_simulated
from scheduler_svc.executors.convert import model_description


def test_state_pages_travel_with_an_admission() -> None:
    admitted = AdmittedSequence(1, [5, 6], 2, 0, [7], SequenceSampling(), state_pages=[9, 3, 4])
    message = plan_to_wire(StepPlan(1, admitted=[admitted]), 1)
    (found,) = plan_from_wire(message).admitted
    assert list(found.state_pages) == [9, 3, 4]
    admitted.state_pages = ()
    without = plan_to_wire(StepPlan(1, admitted=[admitted]), 1)
    assert plan_from_wire(without).admitted[0].state_pages == ()
    assert len(message.SerializeToString()) == len(without.SerializeToString()) + 2 + 1 + 3


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        (([1, 2], [8], [3, 4]), "state_saves"),
        (([1, 2], [8, 8], [3, 4, 5]), "state_saves: 3 page_ids for 2 slots"),
        (([], [], [3]), "state_saves: 1 page_ids for 0 slots"),
    ],
)
def test_columns_of_saves_agree(columns: tuple[list[int], list[int], list[int]], error: str) -> None:
    slots, positions, page_ids = columns
    saves = pb.StateSaves(slots=slots, positions=positions, page_ids=page_ids)
    with pytest.raises(InvalidPlan, match=error):
        plan_from_wire(pb.StepPlan(step_id=1, state_saves=saves))


def test_saved_states_travel_with_a_result() -> None:
    message = result_to_wire(StepResult(3, saved_slots=[2, 2, 5], saved_positions=[8, 16, 8]), 1, 1)
    read = result_from_wire(message)
    assert (list(read.saved_slots), list(read.saved_positions)) == ([2, 2, 5], [8, 16, 8])
    del message.saved_positions[-1]
    with pytest.raises(ProtocolError, match="3 saved_slots and 2 saved_positions"):
        result_from_wire(message)


def test_memory_of_a_gpu_travels_with_the_description() -> None:
    described = build_simulated(ExecutorConfig(simulate="instant", num_gpu_blocks=20))[1]
    assert model_description(description_to_wire(described)).memory == ()
    parts = (MemoryPart("weights", 15 << 30, 16 << 30), MemoryPart("drafts and adapters", 0, -(1 << 20)))
    message = description_to_wire(replace(described, memory=parts))
    assert model_description(message).memory == parts


def test_a_state_of_no_pages_is_refused() -> None:
    message = description_to_wire(build_simulated(ExecutorConfig(simulate="instant", num_gpu_blocks=20))[1])
    assert not message.kv.HasField("state")
    assert model_description(message).pages_per_state == 0
    message.kv.state.pages_per_state = 3
    assert model_description(message).pages_per_state == 3
    message.kv.state.pages_per_state = 0
    message.kv.state.SetInParent()
    with pytest.raises(ProtocolError, match="pages_per_state 0"):
        model_description(message)
