"""Proves that what a lane counts and holds is consistent: for tests and simulations, after each step."""

from __future__ import annotations

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.sequences.sequence import SequenceGroup, held_slot
from scheduler_svc.core.types import SequenceState


def check_lane(lane: Lane) -> None:
    """Check that blocks, slots and states of a lane are consistent; raises InvariantError."""
    for sequence in lane.running:
        if sequence.state is not SequenceState.RUNNING:
            raise InvariantError(f"sequence {sequence.sequence_id} runs in state {sequence.state.name}")
        if lane.sequence_at[held_slot(sequence)] is not sequence:
            raise InvariantError(f"slot {sequence.slot} does not hold sequence {sequence.sequence_id}")
    reserved = [block_id for group in _groups(lane) for block_id in group.reserved_blocks]
    lane.blocks.check_integrity([*lane.running, *lane.swapped], reserved)
    lane.slots.check_integrity([held_slot(sequence) for sequence in lane.running])
    known = {*lane.slots.to_release, *lane.vacated, *(held_slot(sequence) for sequence in lane.running)}
    if any(sequence is not None and slot not in known for slot, sequence in enumerate(lane.sequence_at)):
        raise InvariantError("a free slot keeps its last holder")
    decoding = [sequence for sequence in lane.running if sequence.is_decoding]
    lane.decode_batch.check_integrity(decoding)
    prefilling = set(lane.prefilling)
    for sequence in lane.running:
        if sequence.is_decoding and sequence in prefilling:
            raise InvariantError(f"sequence {sequence.sequence_id} prefills and decodes")
        busy = sequence.is_decoding or sequence in prefilling
        if not (busy or sequence.awaits_fork or sequence.is_beam):
            raise InvariantError(f"sequence {sequence.sequence_id} runs without anything to compute")
    if not prefilling.issubset(lane.running):
        raise InvariantError("a sequence prefills that is not running")
    _check_figures(lane, reserved)


def _check_figures(lane: Lane, reserved: list[int]) -> None:
    """Check what is counted by change against the running sequences and their blocks."""
    if lane.num_stored_tokens != lane.num_distinct_tokens(lane.running.sequences):
        raise InvariantError("the stored tokens are miscounted")
    num_reserved = sum(map(lane.blocks.num_reserved, lane.running)) + len(reserved)
    if lane.num_reserved_tokens != num_reserved * lane.spec.block_size:
        raise InvariantError("the reserved blocks are miscounted")
    if lane.num_running_groups != len(_groups(lane) | {sequence.group for sequence in lane.finishing}):
        raise InvariantError("the running groups are miscounted")


def _groups(lane: Lane) -> set[SequenceGroup]:
    return {sequence.group for sequence in lane.running}
