"""The host's mirror of slots whose sampled tokens stay on the device: advanced at launch, settled with the results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.plan.plan import AdmittedSequence, Limits


@dataclass(frozen=True, slots=True)
class ReportedTokens:
    """The results of a step's R sampling slots, as the device reports them."""

    token_ids: IntArray
    """[R]; without meaning for slots without a token."""
    errors: IntArray
    """[R] SlotError; 0: no error."""
    idle: BoolArray
    """[R]: whether the slot had stopped before the step, unknown to the host at that time."""


class MirrorSlots(Slots):
    """Slots that count a step's tokens when it is enqueued, and learn the token ids when it is done."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        # Admissions of each slot so far: a late result of an earlier sequence must not change a later one.
        self._generations = np.zeros(limits.num_slots, np.int64)

    def _admit(self, sequence: AdmittedSequence) -> None:
        super()._admit(sequence)
        self._generations[sequence.slot] += 1

    def advance(self, scheduled: Scheduled) -> IntArray:
        """Count a step's tokens as computed, and one unknown token for each sampling slot.

        Returns the generations [R] of the sampling slots, an argument of `settle`.
        """
        slots = scheduled.sampling_slots
        self.num_computed_tokens[scheduled.slots] += scheduled.num_tokens
        self.stopped[scheduled.idle_slots] = True
        if scheduled.sources is not None:
            # A fork shares all computed tokens of its source.
            self.num_computed_tokens[slots] = self.num_tokens[slots]
        self.num_tokens[slots[scheduled.takes_token(np.ones(len(slots), np.bool_))]] += 1
        return self._generations[slots]

    def settle(
        self, scheduled: Scheduled, generations: IntArray, positions: IntArray, reported: ReportedTokens
    ) -> None:
        """Apply the results of an advanced step. All earlier steps must be settled.

        positions: [R], of the sampled tokens in their sequences.
        """
        slots = scheduled.sampling_slots
        same_sequence = (self._generations[slots] == generations) & self.admitted[slots]
        samples = scheduled.takes_token(np.ones(len(slots), np.bool_))
        failed = reported.errors != 0
        self.num_tokens[slots[same_sequence & samples & (failed | reported.idle)]] -= 1
        self.num_computed_tokens[slots[same_sequence & reported.idle]] -= 1
        self.stopped[slots[same_sequence & failed]] = True
        received = same_sequence & samples & ~failed & ~reported.idle
        slots, token_ids, positions = slots[received], reported.token_ids[received], positions[received]
        self.token_ids[slots, positions] = token_ids
        self.sampling.add_tokens(slots, token_ids)
        self.stopped[slots[self.ends(slots, token_ids, positions)]] = True
