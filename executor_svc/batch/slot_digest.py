"""A digest of slots, by which a scheduler finds that an executor holds what it planned."""

from __future__ import annotations

import hashlib

import numpy as np

from executor_svc.batch.slots import Slots


def digest_of(slots: Slots) -> bytes:
    """Return SHA-256 over the admitted slots in order.

    For each, little-endian int32: slot, num_tokens, num_prompt_tokens, num_computed_tokens, num_blocks; then its
    token ids; then of each KV group what rows read of its block tables, behind num_blocks of those after the first;
    then the pages of its recurrent state, and the position and pages of each copy of it that is to be made.
    """
    sha = hashlib.sha256()
    for slot in np.flatnonzero(slots.admitted).tolist():
        num_tokens, num_computed = slots.num_tokens[slot], slots.num_computed_tokens[slot]
        counts = (slot, num_tokens, slots.num_prompt_tokens[slot], num_computed, slots.num_blocks[slot])
        sha.update(np.array(counts, "<i4").tobytes())
        sha.update(slots.token_ids[slot, :num_tokens].astype("<i4").tobytes())
        for group, read in enumerate(slots.places.read(slot, num_computed, slots.tables[slot])):
            ends = slots.places.num_blocks[group : group + 1, slot] if group else ()
            sha.update(np.array(ends, "<i4").tobytes() + read.astype("<i4").tobytes())
        sha.update(slots.states.digest_of(slot))
    return sha.digest()
