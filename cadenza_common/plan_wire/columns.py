"""Which fields of a plan are which on the wire: by their names, and for columns of a part by one row of a table.

Numbers and lists of numbers have the same name on both sides. So a new one is written in two places, the proto and the
class, and a new part with columns in three.
"""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from cadenza.v1 import execution_pb2 as pb
from cadenza_common.plan.plan import AdmittedSequence, StepPlan
from cadenza_common.plan.result import StepResult, StepTimings
from cadenza_common.serving.slices import SLICE_ITEMS, Work, slices_of

MOVES = ("swap_out", "copies", "swap_in")
"""Parts of a plan that are BlockMoves on both sides."""
PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "appends": (("slots", "append_slots"), ("block_ids", "append_block_ids")),
    "given": (("slots", "given_slots"), ("token_ids", "given_token_ids")),
    "scheduled": (
        ("slots", "scheduled_slots"),
        ("num_tokens", "scheduled_num_tokens"),
        ("samples", "scheduled_samples"),
    ),
    "forks": (("slots", "fork_slots"), ("source_slots", "fork_source_slots")),
}
"""Parts of a plan with columns: the column's name in the message, and the plan's field."""


def _named_alike(message: Descriptor, of_class: Any, *, repeated: bool) -> tuple[str, ...]:
    """Return the names of numbers, flags and texts, or of lists of them, that are in both."""
    names = {each.name for each in dataclasses.fields(of_class)}
    return tuple(
        each.name
        for each in message.fields
        if each.is_repeated == repeated and each.type != FieldDescriptor.TYPE_MESSAGE and each.name in names
    )


PLAN_NUMBERS = _named_alike(pb.StepPlan.DESCRIPTOR, StepPlan, repeated=False)
PLAN_LISTS = _named_alike(pb.StepPlan.DESCRIPTOR, StepPlan, repeated=True)
SEQUENCE_NUMBERS = _named_alike(pb.AdmittedSequence.DESCRIPTOR, AdmittedSequence, repeated=False)
RESULT_NUMBERS = _named_alike(pb.StepResult.DESCRIPTOR, StepResult, repeated=False)
RESULT_LISTS = _named_alike(pb.StepResult.DESCRIPTOR, StepResult, repeated=True)
TIMINGS = _named_alike(pb.StepTimings.DESCRIPTOR, StepTimings, repeated=False)


def ints(values: Any) -> array[int]:
    """Return a packed repeated field as a buffer of 64-bit integers."""
    # A list first: what a repeated field gives one by one takes twice as long.
    return array("q", values[:])


def ints_in_slices(values: Any) -> Work[array[int]]:
    """Return a packed repeated field as a buffer of 64-bit integers, with a pause after each slice of a long one."""
    return copied_in_slices("q", values)


def copied_in_slices(typecode: str, values: Any) -> Work[array[Any]]:
    """Copy a repeated field, with a pause after each slice of a long one."""
    if len(values) <= SLICE_ITEMS:
        return array(typecode, values[:])
    copied = array(typecode)
    for part in slices_of(values):
        copied += array(typecode, part)
        yield
    return copied
