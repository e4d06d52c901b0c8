"""The scheduler's truth held against the executor's mirror, where no plan is in flight: at depth 1 after each apply."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace

from executor_svc.batch.slots import Slots
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.memory.paged_pool import PagedPool
from scheduler_svc.core.sequences.sequence import Sequence, held_slot

ANY_PAGE = -1


@dataclass(frozen=True)
class SlotState:
    """What the digest of execution.proto's StepResult covers of one slot."""

    slot: int
    num_prompt_tokens: int
    num_computed_tokens: int
    token_ids: Ids[int]
    block_ids: Ids[int]


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
    if lane.blocks.sizes is not None:
        block_ids = _first_pages(lane, sequence, block_ids)
    return SlotState(
        held_slot(sequence), sequence.num_prompt_tokens, sequence.num_computed_tokens, token_ids, block_ids
    )


def _first_pages(lane: Lane, sequence: Sequence, block_ids: list[int]) -> list[int]:
    """With KV groups a slot has the first page of each block in group 0; one before its window may be any."""
    sizes, pool = lane.blocks.sizes, lane.blocks.pool
    assert sizes is not None
    assert isinstance(pool, PagedPool)
    if sizes.full_pages:
        return [pool.full_pages_of(block_id)[0] for block_id in block_ids]
    held = sequence.windows[0]
    return [
        pool.windows[0][block_id][0] if index in held else ANY_PAGE
        for index, block_id in enumerate(block_ids[: held.stop])
    ]


def slot_states(slots: Slots) -> list[SlotState]:
    """Every slot that is taken, as the executor knows it."""
    return [
        SlotState(
            slot,
            int(slots.num_prompt_tokens[slot]),
            int(slots.num_computed_tokens[slot]),
            slots.token_ids[slot, : slots.num_tokens[slot]].tolist(),
            slots.block_tables[slot, : slots.num_blocks[slot]].tolist(),
        )
        for slot in slots.admitted.nonzero()[0].tolist()
    ]


def digest_of(states: Iterable[SlotState]) -> bytes:
    """SHA-256 in the format of `Slots.digest`, written apart from it."""
    sha = hashlib.sha256()
    for state in sorted(states, key=lambda state: state.slot):
        num_tokens, num_blocks = len(state.token_ids), len(state.block_ids)
        counts = (state.slot, num_tokens, state.num_prompt_tokens, state.num_computed_tokens, num_blocks)
        numbers = (*counts, *state.token_ids, *state.block_ids)
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
    for slot, state in ours.items():
        block_ids = [
            mine if mine != ANY_PAGE else other
            for mine, other in zip(state.block_ids, theirs[slot].block_ids, strict=True)
        ]
        assert theirs[slot] == replace(state, block_ids=block_ids)
    whole = not releases_ahead(lane) and lane.blocks.windows is None
    assert not whole or lane_digest(lane) == debug_digest
    return whole
