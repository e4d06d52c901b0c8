"""Numbers of the core's types that the protocol fixes, and what a sequence adds to a plan."""

from __future__ import annotations

import pytest

from cadenza.v1 import execution_pb2, types_pb2
from cadenza_common.plan.result import SlotError, StepStatus
from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.types import FinishDetail


@pytest.mark.parametrize(
    ("ours", "wire", "prefix"),
    [
        (FinishDetail, types_pb2.FinishDetail, "FINISH_DETAIL_"),
        (StepStatus, execution_pb2.StepStatus, "STEP_STATUS_"),
        (SlotError, execution_pb2.SlotError, "SLOT_ERROR_"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_member_has_the_protocols_number(ours, wire, prefix):
    ours_by_name = {f"{prefix}{name}": int(member) for name, member in ours.__members__.items()}
    assert ours_by_name.items() <= dict(wire.items()).items()
    assert {name for name in wire.keys() if not name.endswith("_UNSPECIFIED")} <= ours_by_name.keys()  # noqa: SIM118


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SequenceSampling(), 0),
        (SequenceSampling(temperature=0.5, top_k=7), 0),
        (SequenceSampling(stop_token_ids=(4, 5, 6)), 3),
        (SequenceSampling(bias_token_ids=(1, 2), biases=(0.5, -1.0)), 4),
        (SequenceSampling(stop_token_ids=(4,), allowed_token_ids=(1, 2, 3), bad_words=((1,), (2, 3))), 7),
    ],
)
def test_lists_count_with_all_their_numbers(sampling, expected):
    assert sampling.num_values == expected
