"""The host's copy of slots whose sampled tokens stay on the device: ahead of what it knows, and put right later."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from executor_svc.batch.slots import Scheduled, Slots
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.plan.plan import AdmittedSequence, Limits


@dataclass(frozen=True, slots=True)
class Taken:
    """What a step made of the R slots that sample in it, as the device tells it."""

    token_ids: IntArray
    """[R]; without meaning where there is no token."""
    errors: IntArray
    """[R] SlotError; 0 for the others."""
    idle: BoolArray
    """[R]: had stopped before the step, which the host did not know."""


class MirrorSlots(Slots):
    """Slots that take a step's tokens in two parts: that there is one, when it is enqueued; which, when it is known."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        # Of each slot, how often it was admitted to: what is told of an earlier sequence must not touch a later one.
        self._owners = np.zeros(limits.num_slots, np.int64)

    def _admit(self, sequence: AdmittedSequence) -> None:
        super()._admit(sequence)
        self._owners[sequence.slot] += 1

    def advance(self, scheduled: Scheduled) -> IntArray:
        """Let a step be computed and each slot that samples take an unknown token; returns what `settle` asks for."""
        slots = scheduled.sampling_slots
        self.num_computed_tokens[scheduled.slots] += scheduled.num_tokens
        self.stopped[scheduled.idle_slots] = True
        if scheduled.sources is not None:
            # A fork shares all that its source has computed.
            self.num_computed_tokens[slots] = self.num_tokens[slots]
        self.num_tokens[slots[scheduled.takes_token(np.ones(len(slots), np.bool_))]] += 1
        return self._owners[slots]

    def settle(self, scheduled: Scheduled, owners: IntArray, positions: IntArray, taken: Taken) -> None:
        """Take what an advanced step made; all those before it are settled. Positions [R]: of what was chosen."""
        slots = scheduled.sampling_slots
        mine = (self._owners[slots] == owners) & self.admitted[slots]
        samples = scheduled.takes_token(np.ones(len(slots), np.bool_))
        failed = taken.errors != 0
        self.num_tokens[slots[mine & samples & (failed | taken.idle)]] -= 1
        self.num_computed_tokens[slots[mine & taken.idle]] -= 1
        self.stopped[slots[mine & failed]] = True
        told = mine & samples & ~failed & ~taken.idle
        slots, token_ids, positions = slots[told], taken.token_ids[told], positions[told]
        self.token_ids[slots, positions] = token_ids
        self.sampling.add_tokens(slots, token_ids)
        stop = self.sampling.are_stop_ids(slots, token_ids)
        if stop.any():
            enough = positions + 1 - self.num_prompt_tokens[slots] >= self.sampling["min_tokens"][slots]
            self.stopped[slots[stop & enough]] = True
