"""The decode batch of a lane: sequences that each compute one token or more in every step.

A step without changes increments one counter. A member's number of computed tokens follows from that counter and from
its value when the member joined. The steps in which it needs a new block and in which its last token is planned are
known in advance and kept in calendars. So planning costs time per change, not per member.

With drafts a step may give a member several tokens. It is counted as one until the result is there, which then
corrects the member's counts: they are a lower bound.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.sequences.sequence import Sequence, held_slot

_Calendar = defaultdict[int, dict[Sequence, None]]


class DecodeBatch:
    """The members' slots, and calendars of their next events by step number."""

    def __init__(self, block_size: int) -> None:
        self.num_steps = 0
        """Number of steps planned so far."""
        self.slots: list[int] = []
        """Slots of the members, ascending."""
        self._block_size = block_size
        self.num_drafting = 0
        """Number of members that may have drafts."""
        self.draft_scopes: dict[int, int] = {}
        """How many of these are in each scope."""
        self._offset_sum = 0
        """Sum of the members' differences between num_steps and their computed tokens, which stay as they are."""
        self._block_calendar: _Calendar = defaultdict(dict)
        self._last_token_calendar: _Calendar = defaultdict(dict)

    def __len__(self) -> int:
        return len(self.slots)

    def join(self, sequence: Sequence) -> None:
        """Add a running sequence with exactly one token without KV, not its last; it decodes from the next step."""
        num_computed, num_planned = sequence.num_computed_tokens, sequence.num_planned_tokens
        if num_planned != num_computed + 1 or num_planned >= sequence.max_len:
            raise InvariantError(f"sequence {sequence.sequence_id} is not ready to decode")
        num_steps = self.num_steps
        insort(self.slots, held_slot(sequence))
        if sequence.max_drafts:
            self._count_drafting(sequence, 1)
        sequence.attach_step_counter(self)
        self._offset_sum += num_steps - num_computed
        self._block_calendar[num_steps + len(sequence.block_ids) * self._block_size - num_computed][sequence] = None
        self._last_token_calendar[num_steps + sequence.max_len - num_planned][sequence] = None

    def leave(self, sequence: Sequence) -> None:
        """Remove a member; it keeps its counts."""
        num_computed, num_steps = sequence.num_computed_tokens, self.num_steps
        _unschedule(
            self._block_calendar, num_steps + len(sequence.block_ids) * self._block_size - num_computed, sequence
        )
        _unschedule(self._last_token_calendar, num_steps + sequence.max_len - num_computed - 1, sequence)
        self._offset_sum -= num_steps - num_computed
        if sequence.max_drafts:
            self._count_drafting(sequence, -1)
        del self.slots[bisect_left(self.slots, held_slot(sequence))]
        sequence.detach_step_counter()

    def _count_drafting(self, sequence: Sequence, change: int) -> None:
        """Count a member with drafts that joins (1) or leaves (-1)."""
        self.num_drafting += change
        count = self.draft_scopes.get(sequence.draft_scope, 0) + change
        self.draft_scopes[sequence.draft_scope] = count
        if not count:
            del self.draft_scopes[sequence.draft_scope]

    def correct(self, sequence: Sequence, num_more: int) -> None:
        """Count tokens of a member beyond one a step, after a result; it stays below its maximum length.

        -1: the step gave it none.
        """
        num_computed, num_steps = sequence.num_computed_tokens, self.num_steps
        full_at = num_steps + len(sequence.block_ids) * self._block_size - num_computed
        last_at = num_steps + sequence.max_len - num_computed - 1
        _unschedule(self._block_calendar, full_at, sequence)
        _unschedule(self._last_token_calendar, last_at, sequence)
        self._block_calendar[full_at - num_more][sequence] = None
        self._last_token_calendar[last_at - num_more][sequence] = None
        self._offset_sum -= num_more
        sequence.count_more(num_more)

    def start_all(self, sequences: list[Sequence], slots: list[int]) -> None:
        """Start waiting sequences in these slots; the step being planned computes all of their tokens.

        As `join` for each, once it runs.
        """
        num_steps, size = self.num_steps, self._block_size
        self.slots += slots
        self.slots.sort()
        for sequence, slot in zip(sequences, slots, strict=True):
            num_computed = sequence.start_decoding(slot, self)
            offset = num_steps - num_computed
            self._offset_sum += offset
            if sequence.max_drafts:
                self._count_drafting(sequence, 1)
            self._block_calendar[offset + len(sequence.block_ids) * size][sequence] = None
            self._last_token_calendar[offset + sequence.max_len - 1][sequence] = None

    def finish_all(self, sequences: list[Sequence]) -> list[int]:
        """Remove members that finish; they keep their counts and blocks. Returns the slots that they had.

        As `leave` for each.
        """
        num_steps, size, slots = self.num_steps, self._block_size, []
        blocks, last_tokens = self._block_calendar, self._last_token_calendar
        for sequence in sequences:
            offset = num_steps - sequence.num_computed_tokens
            self._offset_sum -= offset
            if sequence.max_drafts:
                self._count_drafting(sequence, -1)
            _unschedule(blocks, offset + len(sequence.block_ids) * size, sequence)
            _unschedule(last_tokens, offset + sequence.max_len - 1, sequence)
            slot = sequence.finish_decoding()
            slots.append(slot)
            del self.slots[bisect_left(self.slots, slot)]
        return slots

    @property
    def num_computed_tokens(self) -> int:
        """The members' computed tokens in all."""
        return len(self.slots) * self.num_steps - self._offset_sum

    @property
    def num_reserved_blocks(self) -> int:
        """Number of blocks that the members hold beyond those of their tokens."""
        size, num_blocks = self._block_size, 0
        for step_number, members in self._block_calendar.items():
            num_left = step_number - self.num_steps
            if num_left < size:
                continue
            num_blocks += num_left // size * len(members)
            if num_left % size == 0:
                # A confirmed token without KV counts as well, and needs one of these blocks.
                num_blocks -= sum(sequence.num_pending == 0 for sequence in members)
        return num_blocks

    @property
    def num_needing_blocks(self) -> int:
        """Number of `needing_blocks`."""
        return len(self._block_calendar.get(self.num_steps, ()))

    @property
    def needing_blocks(self) -> list[Sequence]:
        """The members that need one more block for the next step."""
        return list(self._block_calendar.get(self.num_steps, ()))

    def without_room(self, num_tokens: int) -> list[Sequence]:
        """The members with drafts whose blocks end within so many tokens after the next step's, their last excepted."""
        size, calendar = self._block_size, self._block_calendar
        steps = range(self.num_steps, self.num_steps + num_tokens + 1)
        return [
            sequence
            for step_number in steps
            for sequence in calendar.get(step_number, ())
            if sequence.max_drafts and len(sequence.block_ids) * size < sequence.max_len - 1
        ]

    def append_blocks(self, sequences: list[Sequence], block_ids: list[int]) -> None:
        """Append one block to each of the `needing_blocks` members."""
        later = self._block_calendar[self.num_steps + self._block_size]
        del self._block_calendar[self.num_steps]
        for sequence, block_id in zip(sequences, block_ids, strict=True):
            sequence.block_ids.append(block_id)
            later[sequence] = None

    def append_early(self, sequence: Sequence, block_id: int) -> None:
        """Append a block to a member whose blocks are not full yet."""
        full_at = self._needs_block_at(sequence)
        _unschedule(self._block_calendar, full_at, sequence)
        self._block_calendar[full_at + self._block_size][sequence] = None
        sequence.block_ids.append(block_id)

    def advance(self) -> list[Sequence]:
        """Plan one token for every member; returns the members whose last token this is."""
        self.num_steps += 1
        return list(self._last_token_calendar.get(self.num_steps, ()))

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Check that the calendars hold exactly these members at the right steps; raises InvariantError."""
        if self.slots != sorted(held_slot(sequence) for sequence in sequences):
            raise InvariantError(f"the decode batch holds the slots {self.slots}")
        for sequence in sequences:
            if sequence not in self._block_calendar.get(self._needs_block_at(sequence), ()):
                raise InvariantError(f"sequence {sequence.sequence_id} is not in the calendar of blocks")
            if sequence not in self._last_token_calendar.get(self._last_token_at(sequence), ()):
                raise InvariantError(f"sequence {sequence.sequence_id} is not in the calendar of last tokens")
        for calendar in (self._block_calendar, self._last_token_calendar):
            if sum(map(len, calendar.values())) != len(sequences):
                raise InvariantError("a calendar holds a sequence that is not a member")
        if self.num_drafting != sum(sequence.max_drafts > 0 for sequence in sequences):
            raise InvariantError("the members with drafts are miscounted")
        if self.draft_scopes != Counter(sequence.draft_scope for sequence in sequences if sequence.max_drafts):
            raise InvariantError("the scopes of the members with drafts are miscounted")
        if self.num_computed_tokens != sum(sequence.num_computed_tokens for sequence in sequences):
            raise InvariantError("the computed tokens of the decode batch are miscounted")

    def _needs_block_at(self, sequence: Sequence) -> int:
        """The value of num_steps at which its blocks are full."""
        return self.num_steps + len(sequence.block_ids) * self._block_size - sequence.num_computed_tokens

    def _last_token_at(self, sequence: Sequence) -> int:
        """The value of num_steps after the step that plans its last token."""
        return self.num_steps + sequence.max_len - sequence.num_planned_tokens


def _unschedule(calendar: _Calendar, step_number: int, sequence: Sequence) -> None:
    entries = calendar[step_number]
    del entries[sequence]
    if not entries:
        del calendar[step_number]
