"""The sequences of a lane that decode: each computes one token in every step, so what they share is counted once.

A steady step moves one clock. What a member has computed follows from the clock and from when it joined, and what will
happen to it is known ahead: the step in which it outgrows its blocks, and the step that plans its last token. So the
cost of planning follows change, not the number of members.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.sequences.sequence import Sequence, held_slot

_Calendar = defaultdict[int, dict[Sequence, None]]


class DecodeBatch:
    """Members, by slot, and a calendar of what happens to them. A day of it is a step of the cohort."""

    def __init__(self, block_size: int) -> None:
        self.num_steps = 0
        """Steps planned so far."""
        self.slots: list[int] = []
        """Of the members, ascending."""
        self._block_size = block_size
        self._outgrow: _Calendar = defaultdict(dict)
        self._last: _Calendar = defaultdict(dict)

    def __len__(self) -> int:
        return len(self.slots)

    def join(self, sequence: Sequence) -> None:
        """Take in a running sequence that lacks the KV of exactly one token, not its last: from the next step on."""
        if sequence.num_uncomputed_tokens != 1 or sequence.fully_planned:
            raise InvariantError(f"sequence {sequence.sequence_id} is not ready to decode")
        insort(self.slots, held_slot(sequence))
        sequence.attach_step_counter(self)
        self._outgrow[self._outgrows_at(sequence)][sequence] = None
        self._last[self._last_at(sequence)][sequence] = None

    def leave(self, sequence: Sequence) -> None:
        """Let a member go; it keeps its counts."""
        _unschedule(self._outgrow, self._outgrows_at(sequence), sequence)
        _unschedule(self._last, self._last_at(sequence), sequence)
        del self.slots[bisect_left(self.slots, held_slot(sequence))]
        sequence.detach_step_counter()

    @property
    def outgrowing(self) -> list[Sequence]:
        """The members that need one more block for the next step."""
        return list(self._outgrow.get(self.num_steps, ()))

    def append_blocks(self, sequences: list[Sequence], block_ids: list[int]) -> None:
        """One more block for each of those that outgrow theirs."""
        later = self._outgrow[self.num_steps + self._block_size]
        del self._outgrow[self.num_steps]
        for sequence, block_id in zip(sequences, block_ids, strict=True):
            sequence.block_ids.append(block_id)
            later[sequence] = None

    def advance(self) -> list[Sequence]:
        """Every member computes one token; returns those for which the step plans the last one."""
        self.num_steps += 1
        return list(self._last.get(self.num_steps, ()))

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Prove that the calendar holds these members, each on its days; raises InvariantError."""
        if self.slots != sorted(held_slot(sequence) for sequence in sequences):
            raise InvariantError(f"the cohort holds the slots {self.slots}")
        for sequence in sequences:
            if sequence not in self._outgrow.get(self._outgrows_at(sequence), ()):
                raise InvariantError(f"sequence {sequence.sequence_id} is not in the calendar of blocks")
            if sequence not in self._last.get(self._last_at(sequence), ()):
                raise InvariantError(f"sequence {sequence.sequence_id} is not in the calendar of last tokens")
        for calendar in (self._outgrow, self._last):
            if sum(map(len, calendar.values())) != len(sequences):
                raise InvariantError("a calendar holds a sequence that has left")

    def _outgrows_at(self, sequence: Sequence) -> int:
        """The clock at which its blocks are full."""
        return self.num_steps + len(sequence.block_ids) * self._block_size - sequence.num_computed_tokens

    def _last_at(self, sequence: Sequence) -> int:
        """The clock after the step that plans its last token."""
        return self.num_steps + sequence.max_len - sequence.num_planned_tokens


def _unschedule(calendar: _Calendar, day: int, sequence: Sequence) -> None:
    entries = calendar[day]
    del entries[sequence]
    if not entries:
        del calendar[day]
