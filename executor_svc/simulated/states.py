"""Recurrent states of the simulated executor: a digest that depends on the order of all tokens before a position.

The state behind position p is s = mix(K * s + the token's hash), over the tokens before p, from 0. Its pages hold what
a real one's hold: where it stands, the digest there, and the hashes of the tokens behind, which a later step folds. The
tokens of the model do not depend on states: what a step reads is compared with what the slot's own tokens give, and a
difference goes into all that the step writes and chooses.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slot_states import ArmedSave, check_folded
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray, ints
from executor_svc.sampling.splitmix64 import MASK, MIX_2, mix
from executor_svc.simulated.hashing import U64, token_hashes
from executor_svc.simulated.memory import DigestPools

_STANDS, _DIGEST, _TAIL = 0, 1, 2
"""Columns of a page: where the state stands, its digest there, and the tail, a ring of token hashes by position."""
_LOST = 0x10_57
"""Stands for the difference of a state that cannot be brought to its position."""


def state_width(tail: int) -> int:
    """Return how many numbers a page holds of a state whose tail has so many tokens."""
    return _TAIL + tail


class SimulatedStates:
    """Reads and writes the states of slots in the digest pools."""

    def __init__(self, slots: Slots, pools: DigestPools) -> None:
        self._slots = slots
        self._pools = pools
        self._tail = slots.limits.state_tail
        self._salts = np.array([mix(0x57A7E + page) for page in range(slots.limits.pages_per_state)], np.uint64)
        """[P] what distinguishes the pages of a state."""
        self._known: dict[int, tuple[U64, list[int]]] = {}
        """By slot: hashes of its tokens, and the digests that they give, the one of no tokens first."""
        self.adapter_keys: U64 = np.zeros(slots.limits.num_slots, np.uint64)
        """By slot: `hashing.adapter_key` of its adapter."""
        self.errors: U64 = np.zeros(slots.limits.num_slots, np.uint64)
        """By slot: the difference of what the last step read; 0: none."""
        self.saved: list[tuple[int, int]] = []
        """Slots and positions of the copies that the last step made."""

    def check_admitted(self, plan: StepPlan) -> None:
        """Check where admitted states stand, once a plan has moved its pages; raises InvalidPlan."""
        forks = set(ints(plan.fork_slots).tolist())
        slots = np.array([each.slot for each in plan.admitted if each.slot not in forks], np.int64)
        stands = self._pools.device_states[self._slots.states.tables[slots, 0], _STANDS].astype(np.int64)
        check_folded(slots, stands, self._slots.num_computed_tokens[slots], self._tail)

    def step(self, scheduled: Scheduled) -> None:
        """Let all scheduled slots fold, save and write what a step of a recurrent layer does."""
        self.saved = []
        context = self._slots.num_computed_tokens[scheduled.slots]
        ends = self._slots.states.ends(context, scheduled.num_tokens)
        columns = scheduled.slots.tolist(), context.tolist(), scheduled.num_tokens.tolist(), ends.tolist()
        for slot, first, count, end in zip(*columns, strict=True):
            self._step(slot, first, count, end)
        self._slots.states.made(scheduled.slots, ends)

    def _step(self, slot: int, context: int, count: int, end: int) -> None:
        """Compute so many tokens behind the context; the state stands at `end` afterwards."""
        hashes, right = self._of_tokens(slot, context + count)
        stands, digest, tail, error = self._read(slot, context)
        values = {stands: digest}
        for position in range(stands, end):
            # What was computed before this step comes from the tail.
            token = tail[position % self._tail] if position < context else int(hashes[position])
            digest = values[position + 1] = _fold(digest, token)
        self.errors[slot] = (error + values[context] - right[context]) & MASK
        for position in range(end, context + count):
            tail[position % self._tail] = int(hashes[position])
        self._save(slot, self._slots.states.armed.get(slot, ()), values)
        self._write(self._slots.states.tables[slot].astype(np.int64), end, digest, tail)

    def _read(self, slot: int, context: int) -> tuple[int, int, list[int], int]:
        """Return where a state stands, its digest, its tail, and what its pages differ from one another.

        At position 0 it is 0, whatever the pages hold.
        """
        parts = self._pools.device_states[self._slots.states.tables[slot]]
        tail = [int(value) for value in parts[-1, _TAIL:]]
        stands = int(parts[0, _STANDS])
        if not context:
            return 0, 0, tail, 0
        if not stands:
            return 0, 0, tail, 0 if context <= self._tail else _LOST
        if not stands <= context <= stands + self._tail:
            return context, 0, tail, _LOST
        digests = [(int(value) - int(salt)) & MASK for value, salt in zip(parts[:, _DIGEST], self._salts, strict=True)]
        return stands, digests[0], tail, sum(each != digests[0] for each in digests) * _LOST

    def _save(self, slot: int, armed: Iterable[ArmedSave], values: dict[int, int]) -> None:
        for save in armed:
            if save.position in values:
                self._write(save.pages.astype(np.int64), save.position, values[save.position], [])
                self.saved.append((slot, save.position))

    def _write(self, pages: IntArray, stands: int, digest: int, tail: list[int]) -> None:
        parts = np.zeros((len(pages), _TAIL + self._tail), np.uint64)
        parts[0, _STANDS] = stands
        parts[:, _DIGEST] = np.array(digest, np.uint64) + self._salts
        parts[-1, _TAIL : _TAIL + len(tail)] = tail
        self._pools.write_state(pages, parts)

    def _of_tokens(self, slot: int, length: int) -> tuple[U64, list[int]]:
        """Return hashes [length] of a slot's tokens, and the digests [length + 1] that they give."""
        token_ids = self._slots.token_ids[slot, :length].astype(np.int64)
        hashes = token_hashes(token_ids, np.arange(length), self.adapter_keys[np.full(length, slot)])
        before, digests = self._known.get(slot, (hashes[:0], [0]))
        num_equal = min(len(before), length)
        (unlike,) = (before[:num_equal] != hashes[:num_equal]).nonzero()
        num_equal = int(unlike[0]) if len(unlike) else num_equal
        digests = digests[: num_equal + 1]
        for value in hashes[num_equal:].tolist():
            digests.append(_fold(digests[-1], value))
        self._known[slot] = hashes, digests
        return hashes, digests


def _fold(digest: int, token: int) -> int:
    return mix((digest * MIX_2 + token) & MASK)
