"""The scheduler's truth held against the executor's mirror, where no plan is in flight: at depth 1 after each apply."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from executor_svc.slots import Slots
from scheduler_svc.core.lane import Lane


@dataclass(frozen=True)
class SlotState:
    """What the digest of execution.proto's StepResult covers of one slot."""

    slot: int
    num_prompt_tokens: int
    num_computed_tokens: int
    token_ids: Sequence[int]
    block_ids: Sequence[int]


def lane_states(lane: Lane) -> list[SlotState]:
    """Every sequence that holds a slot, as the scheduler knows it."""
    return [
        SlotState(
            sequence.slot, sequence.num_prompt_tokens, sequence.num_computed_tokens, sequence.token_ids,
            sequence.block_ids,
        )
        for sequence in lane.running
        if sequence.slot is not None
    ]  # fmt: skip


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
    """Slots that are given up here and of which the next plan tells the executor."""
    return set(lane.slots._to_release)


def check_mirror(lane: Lane, mirror: Slots, debug_digest: bytes) -> bool:
    """Assert that the executor's slots are those of the lane; beside them only such as the next plan releases.

    Returns whether there are none of these, so that the reported digest was compared as a whole.
    """
    theirs = {state.slot: state for state in slot_states(mirror)}
    assert digest_of(theirs.values()) == debug_digest
    ours = {state.slot: state for state in lane_states(lane)}
    assert theirs.keys() == ours.keys() | releases_ahead(lane)
    for slot, state in ours.items():
        assert theirs[slot] == state
    whole = not releases_ahead(lane)
    assert not whole or lane_digest(lane) == debug_digest
    return whole
