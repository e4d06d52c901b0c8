"""Which copies of states are made for the prefix cache: where a prompt ends, where prefixes branch, and now and then.

A later request goes on behind a copy instead of computing the prefix again. Copies take pages only while there are
enough for all that runs, and never any that is held (docs/decisions/0071).
"""

from __future__ import annotations

from collections.abc import Iterable

from cadenza_common.plan.plan import StateSaves
from cadenza_common.plan.result import StepResult
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.sequences.sequence import Sequence, held_slot


def save_in_chunk(lane: Lane, step: PlannedStep, sequence: Sequence, context_len: int, num_tokens: int) -> None:
    """Arm the copies that are wanted of a sequence's state while it computes these tokens.

    At the end of its prompt; where the KV ended that it found, if no copy was there: it has been seen twice; after
    every interval. And once more where its hit ended, if that copy came from the host.
    """
    sizes, size = lane.blocks.sizes, lane.spec.block_size
    if sizes is None or not _may_save(lane, sequence):
        return
    first, last, interval = context_len // size + 1, (context_len + num_tokens) // size, sizes.interval
    found, *matched = sequence.prefix_ends or (0,)
    ends = {(sequence.num_prompt_tokens - 1) // size, *matched}
    ends.update(range(-(-first // interval) * interval, last + 1, interval))
    wanted = [end for end in ends if first <= end <= last]
    if found and found * size == context_len:
        wanted.append(found)
    _arm(lane, step, sequence, sorted(wanted))


def save_in_decode(lane: Lane, step: PlannedStep, sequences: Iterable[Sequence]) -> None:
    """Arm copies of the states of decoding sequences that are about to get another block, where an interval ends."""
    sizes = lane.blocks.sizes
    if sizes is None or lane.blocks.snapshots is None:
        return
    for sequence in sequences:
        if len(sequence.block_ids) % sizes.interval == 0 and _may_save(lane, sequence):
            _arm(lane, step, sequence, [len(sequence.block_ids)])


def _may_save(lane: Lane, sequence: Sequence) -> bool:
    return (
        lane.blocks.snapshots is not None
        and bool(sequence.state_pages)
        and sequence.described
        and not (sequence.is_beam and sequence.group.forked)
        and sequence.group.spec.uses_prefix_cache
    )


def _arm(lane: Lane, step: PlannedStep, sequence: Sequence, ends: list[int]) -> None:
    """Arm copies behind so many blocks each, unless there is one; as far as pages are left for all that runs."""
    blocks, snapshots, slot = lane.blocks, lane.blocks.snapshots, held_slot(sequence)
    if snapshots is None or blocks.states is None:
        return
    num_pages, spare = blocks.states.num_pages, len(lane.running) * blocks.block_pages
    for end in ends:
        if snapshots.is_armed(slot, end) or snapshots.has(sequence.block_ids[end - 1]):
            continue
        if blocks.can_take(num_pages + spare, alone=False):
            step.saves.append((slot, end * lane.spec.block_size, snapshots.arm(sequence, slot, end)))


def close_saves(step: PlannedStep) -> None:
    """Put the copies that were armed into the plan."""
    if step.saves:
        step.saves.sort(key=lambda save: save[:2])
        slots, positions, pages = zip(*step.saves, strict=True)
        step.plan.state_saves = StateSaves(slots, positions, [page for each in pages for page in each])


def check_saved(lane: Lane, result: StepResult) -> None:
    """Raise InvariantError for copies of states that no plan can have asked for; changes nothing."""
    size, num_slots = lane.spec.block_size, lane.spec.num_slots
    if not result.saved_slots and not result.saved_positions:
        return
    wrong = len(result.saved_slots) != len(result.saved_positions)
    wrong = wrong or not all(0 <= slot < num_slots for slot in result.saved_slots)
    if wrong or not lane.spec.pages_per_state or any(position % size for position in result.saved_positions):
        raise InvariantError(
            f"step {result.step_id}: states saved of slots {list(result.saved_slots)} at {list(result.saved_positions)}"
        )


def take_saved(lane: Lane, step: PlannedStep, result: StepResult) -> None:
    """The copies that a step has made may be found from now on."""
    snapshots = lane.blocks.snapshots
    if snapshots is not None:
        for slot, position in zip(result.saved_slots, result.saved_positions, strict=True):
            step.saved.append((position, snapshots.take_made(slot, position)))
