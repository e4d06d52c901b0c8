"""The host's mirror of slots whose sampled tokens stay on the device: advanced at launch, settled with the results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cadenza_common.plan.plan import AdmittedSequence
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import LATE
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.plan.limits import Limits


@dataclass(frozen=True, slots=True)
class ReportedTokens:
    """The results of a step's Q rows, as the device reports them."""

    token_ids: IntArray
    """[Q]; without meaning for rows without a token."""
    errors: IntArray
    """[Q] SlotError; 0: no error; NOT_ACCEPTED; LATE."""
    idle: BoolArray | None
    """[Q]: whether the slot had stopped before the step, unknown to the host at that time. None: no slot had, and no
    row has an error."""
    positions: IntArray
    """[Q] of the sampled tokens in their sequences."""

    @property
    def has_tokens(self) -> bool:
        """Whether every row has a token."""
        return self.idle is None or not (self.errors.any() or self.idle.any())


class MirrorSlots(Slots):
    """Slots that count a step's tokens when it is enqueued, and learn the token ids when it is done.

    Of a step with drafts they count the least that it gives, one token for each sampling slot, until it is done.
    """

    def __init__(self, limits: Limits, compared: bool = False) -> None:
        super().__init__(limits, compared)
        # Admissions of each slot so far: a late result of an earlier sequence must not change a later one.
        self.generations = np.zeros(limits.num_slots, np.int64)
        """[num_slots]."""

    def _admit(self, sequence: AdmittedSequence) -> None:
        super()._admit(sequence)
        self.generations[sequence.slot] += 1

    def advance(self, scheduled: Scheduled) -> IntArray:
        """Count a step's tokens as computed, and one unknown token for each sampling slot; scheduled: without drafts.

        Returns the generations [R] of the sampling slots, an argument of `settle`.
        """
        slots = scheduled.sampling_slots
        self.num_computed_tokens[scheduled.slots] += scheduled.num_tokens
        if scheduled.is_one_each and not len(scheduled.candidates):
            self.num_tokens[slots] += 1
            return self.generations[slots]
        self.stopped[scheduled.idle_slots] = True
        if scheduled.sources is not None:
            # A fork shares all computed tokens of its source.
            self.num_computed_tokens[slots] = self.num_tokens[slots]
        self.num_tokens[slots[scheduled.takes_token(np.ones(len(slots), np.bool_))]] += 1
        return self.generations[slots]

    def settle(self, scheduled: Scheduled, generations: IntArray, reported: ReportedTokens) -> None:
        """Apply the results of an advanced step. All earlier steps must be settled.

        scheduled: with the drafts that were made.
        """
        rows, slots = scheduled.rows, scheduled.sampling_slots
        same_sequence = (self.generations[slots] == generations) & self.admitted[slots]
        if rows.ahead is None and reported.has_tokens and not len(rows.candidates):
            # A token for each slot, as nearly always.
            token_ids, positions = reported.token_ids, reported.positions
            if not same_sequence.all():
                slots, token_ids, positions = (each[same_sequence] for each in (slots, token_ids, positions))
            self._receive(slots, token_ids, positions)
            return
        slots, ahead = rows.slots, np.zeros_like(rows.slots) if rows.ahead is None else rows.ahead
        same_sequence = same_sequence[(ahead == 0).cumsum() - 1]
        samples = scheduled.takes_token(np.ones(len(slots), np.bool_))
        first, idle = ahead == 0, np.zeros(len(ahead), np.bool_) if reported.idle is None else reported.idle
        late = (reported.errors == LATE) & first
        failed = (reported.errors != 0) & first & ~late
        self.num_tokens[slots[same_sequence & samples & (failed | late | idle)]] -= 1
        self.num_computed_tokens[slots[same_sequence & (late | idle)]] -= 1
        if (failed | late | idle).any():
            self._stop(slots[same_sequence & failed])
        received = same_sequence & samples & (reported.errors == 0) & ~idle
        for index in range(int(ahead.max(initial=0)) + 1):
            these = np.flatnonzero(received & (ahead == index))
            if index:
                self.num_tokens[slots[these]] += 1
                self.num_computed_tokens[slots[these]] += 1
            self._receive(slots[these], reported.token_ids[these], reported.positions[these])

    def _receive(self, slots: IntArray, token_ids: IntArray, positions: IntArray) -> None:
        """Write a token [n] of each of n slots, no slot twice, which are counted already."""
        self._write_tokens(slots, positions, token_ids)
        ends = self.ends(slots, token_ids, positions)
        if ends.any():
            self._stop(slots[ends])
