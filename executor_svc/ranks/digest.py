"""What ranks compare before a step: that they have the same plan, the same work, and the same slots."""

from __future__ import annotations

import xxhash

from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.writes import Writes

_PARTS = "another plan", "other work", "other slots"
_PART_BYTES = 8


def digest_of(wire: bytes, scheduled: Scheduled, slots: Slots) -> bytes:
    """Return 8 bytes for each part: the plan's message, what it schedules, and the slots once it is applied.

    Of the slots it has their counts and flags, and all that was written to them in this session: tokens, block tables
    and admissions. Memory that changes by itself is not found.
    """
    work, state = Writes(), Writes()
    work.add(scheduled.slots, scheduled.num_tokens, scheduled.samples, scheduled.idle_slots, scheduled.sampling_slots)
    if scheduled.sources is not None:
        work.add(scheduled.sources)
    columns = slots.num_tokens, slots.num_computed_tokens, slots.num_blocks, slots.stopped, slots.held
    (admitted,) = slots.admitted.nonzero()
    state.add(admitted, *(column[admitted] for column in columns))
    written = xxhash.xxh3_64(state.digest() + slots.writes.digest()).digest()
    return xxhash.xxh3_64(wire).digest() + work.digest() + written


def difference(own: bytes, other: bytes) -> str:
    """Return the first part in which two digests differ."""
    ends = range(_PART_BYTES, len(own) + 1, _PART_BYTES)
    return next(part for part, end in zip(_PARTS, ends, strict=True) if own[:end] != other[:end])
