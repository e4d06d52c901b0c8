"""The scheduler's truth held against the executor's mirror, where no plan is in flight: at depth 1 after each apply."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass

from executor_svc.batch.slots import Slots
from scheduler_svc.core.kv_groups import KVGroup
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.memory.paged_pool import PagedPool
from scheduler_svc.core.sequences.sequence import Sequence, held_slot


@dataclass(frozen=True)
class GroupEntries:
    """A slot's block table in one KV group."""

    num_blocks: int
    """Its end."""
    pages: Ids[int]
    """The entries of each strip, in a window from the first one on that the next row reads."""


@dataclass(frozen=True)
class SlotState:
    """What the digest of execution.proto's StepResult covers of one slot."""

    slot: int
    num_prompt_tokens: int
    num_computed_tokens: int
    token_ids: Ids[int]
    tables: Ids[GroupEntries]
    state_pages: Ids[int] = ()
    armed: Ids[tuple[int, Ids[int]]] = ()
    """Positions of copies of its state that are to be made, and the pages of each."""


def lane_states(lane: Lane) -> list[SlotState]:
    """Every sequence that the executor knows from plans and holds a slot, as far as it knows it."""
    return [_told(lane, sequence) for sequence in lane.running if sequence.described]


def _told(lane: Lane, sequence: Sequence) -> SlotState:
    """Of a fork the executor lacks the blocks that it does not write to yet; of a beam the token that it is given."""
    block_ids, token_ids = sequence.block_ids, list(sequence.token_ids)
    if lane.pending_copy_on_write.get(sequence):
        block_ids = block_ids[: sequence.num_computed_tokens // lane.spec.block_size]
    if sequence.group in lane.due_beam_groups and sequence in sequence.group.due_beams:
        token_ids = token_ids[:-1]
    return SlotState(
        held_slot(sequence),
        sequence.num_prompt_tokens,
        sequence.num_computed_tokens,
        token_ids,
        _tables(lane, sequence, block_ids),
        list(sequence.state_pages),
        _armed(lane, sequence),
    )


def _armed(lane: Lane, sequence: Sequence) -> list[tuple[int, list[int]]]:
    snapshots = lane.blocks.snapshots
    saves = () if snapshots is None else snapshots.of(sequence)
    return [(save.num_blocks * lane.spec.block_size, list(save.pages)) for save in saves if not save.is_made]


def _tables(lane: Lane, sequence: Sequence, block_ids: list[int]) -> list[GroupEntries]:
    """Tables of a sequence's blocks: without KV groups a block is a page."""
    sizes, pool = lane.blocks.sizes, lane.blocks.pool
    if sizes is None:
        return [GroupEntries(len(block_ids), block_ids)]
    assert isinstance(pool, PagedPool)
    found, number = [], 0
    for group in lane.spec.kv_groups or (KVGroup(0),):
        start, end, pages = 0, len(block_ids), pool.full_pages_of
        if group.window is not None:
            start = first_read(sequence.num_computed_tokens, group.window, sizes.block_size)
            end, pages = min(sequence.windows[number].stop, end), pool.windows[number].__getitem__
            number += 1
        of_blocks = [pages(block_id) for block_id in block_ids[start:end]]
        strips = range(group.pages_per_block)
        found.append(GroupEntries(end, [of_block[strip] for strip in strips for of_block in of_blocks]))
    return found


def first_read(num_computed: int, window: int, block_size: int) -> int:
    """The first block that the row at this position reads."""
    return max(0, num_computed - window + 1) // block_size


def slot_states(slots: Slots) -> list[SlotState]:
    """Every slot that is taken, as the executor knows it."""
    return [
        SlotState(
            slot,
            int(slots.num_prompt_tokens[slot]),
            int(slots.num_computed_tokens[slot]),
            slots.token_ids[slot, : slots.num_tokens[slot]].tolist(),
            _read_tables(slots, slot),
            slots.states.tables[slot].tolist(),
            [(save.position, save.pages.tolist()) for save in slots.states.armed.get(slot, ())],
        )
        for slot in slots.admitted.nonzero()[0].tolist()
    ]


def _read_tables(slots: Slots, slot: int) -> list[GroupEntries]:
    found, strips = [], iter(slots.tables[slot])
    for index, group in enumerate(slots.limits.groups):
        end, start = int(slots.places.num_blocks[index, slot]), 0
        if group.window:
            start = first_read(int(slots.num_computed_tokens[slot]), group.window, slots.limits.block_size)
        own = [next(strips)[start:end].tolist() for _ in range(group.pages_per_block)]
        found.append(GroupEntries(end, [page for strip in own for page in strip]))
    return found


def digest_of(states: Iterable[SlotState]) -> bytes:
    """SHA-256 in the format of `Slots.digest`, written apart from it."""
    sha = hashlib.sha256()
    for state in sorted(states, key=lambda state: state.slot):
        counts = (state.slot, len(state.token_ids), state.num_prompt_tokens, state.num_computed_tokens)
        first, *others = state.tables
        numbers = [*counts, first.num_blocks, *state.token_ids, *first.pages]
        for table in others:
            numbers += [table.num_blocks, *table.pages]
        numbers += state.state_pages
        for position, pages in state.armed:
            numbers += [position, *pages]
        sha.update(struct.pack(f"<{len(numbers)}i", *numbers))
    return sha.digest()


def lane_digest(lane: Lane) -> bytes:
    """What the executor should report, if all slots that were given up have been released there."""
    return digest_of(lane_states(lane))


def releases_ahead(lane: Lane) -> set[int]:
    """Slots whose sequence is given up here, with the slot or alone, which the next plan reports to the executor."""
    return {*lane.slots._to_release, *lane.stale_slots}


def check_mirror(lane: Lane, mirror: Slots, debug_digest: bytes) -> bool:
    """Assert that the executor's slots are those of the lane; beside them only such as the next plan releases.

    Returns whether there are none of these, so that the reported digest was compared as a whole.
    """
    theirs = {state.slot: state for state in slot_states(mirror)}
    assert digest_of(theirs.values()) == debug_digest
    ours = {state.slot: state for state in lane_states(lane)}
    assert theirs.keys() == ours.keys() | releases_ahead(lane)
    assert all(theirs[slot] == state for slot, state in ours.items())
    whole = not releases_ahead(lane)
    assert not whole or lane_digest(lane) == debug_digest
    return whole
