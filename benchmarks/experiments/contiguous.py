"""Memory allocation before paging: each request gets one contiguous range of slots for its greatest possible length.

As in the vLLM paper (section 6.1 of https://arxiv.org/abs/2309.06180), the comparison is with Orca and a buddy
allocator, which reserves the model's greatest length, or the output's length rounded up to a power of two, or exactly
the needed length, which only an oracle knows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import ClassVar, Protocol

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.queues.queues import WaitingQueue
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup

NumSlots = Callable[[int, int], int]
"""Slots to reserve, from prompt and output tokens."""


def to_max(max_model_len: int) -> NumSlots:
    """Always the model's greatest length."""
    return lambda num_prompt, num_output: max_model_len


def to_power_of_two(max_model_len: int) -> NumSlots:
    """The output's length is known up to a factor of two."""
    return lambda num_prompt, num_output: min(max_model_len, num_prompt + round_up(num_output))


def to_oracle(num_prompt: int, num_output: int) -> int:
    """The output's length is known. The last token's KV is never needed, but reservation includes it."""
    return num_prompt + num_output


def round_up(count: int) -> int:
    """The smallest power of two that is at least `count`, which is at least 1."""
    return 1 << (count - 1).bit_length()


class Allocator(Protocol):
    """Allocates contiguous ranges of slots."""

    def take(self, count: int) -> int | None:
        """Allocate a range of `count` slots; returns its first slot, or None if there is no such range."""

    def give(self, start: int) -> None:
        """Free a range."""


class BuddyAllocator:
    """Ranges are powers of two: halved if they are too large, and joined with their buddy when both are free (Knowlton,
    CACM 1965, https://doi.org/10.1145/365628.365655). A pool of another size is divided into powers of two.
    """

    def __init__(self, num_slots: int) -> None:
        self._free: dict[int, list[int]] = {}
        """Starts of free ranges by size, ascending."""
        self._taken: dict[int, int] = {}
        start = 0
        while start < num_slots:
            size = 1 << ((num_slots - start).bit_length() - 1)
            self._free.setdefault(size, []).append(start)
            start += size

    def take(self, count: int) -> int | None:
        """See Allocator."""
        wanted = round_up(count)
        size = min((size for size, starts in self._free.items() if starts and size >= wanted), default=None)
        if size is None:
            return None
        start = self._free[size].pop(0)
        while size > wanted:
            size //= 2
            insort(self._free.setdefault(size, []), start + size)
        self._taken[start] = size
        return start

    def give(self, start: int) -> None:
        """See Allocator."""
        size = self._taken.pop(start)
        while self._remove(size, start ^ size):
            start, size = min(start, start ^ size), size * 2
        insort(self._free.setdefault(size, []), start)

    def _remove(self, size: int, start: int) -> bool:
        starts = self._free.get(size, [])
        place = bisect_left(starts, start)
        if place == len(starts) or starts[place] != start:
            return False
        del starts[place]
        return True


class FirstFitAllocator:
    """Ranges of any length, each in the first free range that is long enough."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._taken: list[tuple[int, int]] = []
        """(start, end), ascending."""

    def take(self, count: int) -> int | None:
        """See Allocator."""
        for start, end in self._holes():
            if end - start >= count:
                insort(self._taken, (start, start + count))
                return start
        return None

    def give(self, start: int) -> None:
        """See Allocator."""
        del self._taken[bisect_left(self._taken, (start, 0))]

    def _holes(self) -> Iterator[tuple[int, int]]:
        last = 0
        for start, end in self._taken:
            yield last, start
            last = end
        yield last, self._num_slots


class ContiguousReservation:
    """A batching policy: a waiting group may join any step, first come first served, if there is a range for it.

    The core counts slots (blocks of one token); this policy decides where they are. A range is never taken away, so
    there are no preemptions.
    """

    is_placed: ClassVar[bool] = False

    def __init__(self, allocator: Allocator, num_slots: NumSlots) -> None:
        self._allocator = allocator
        self._num_slots = num_slots
        self._starts: dict[SequenceGroup, int] = {}

    def num_admissible(self, lane: Lane, waiting: WaitingQueue, now: float, *, draining: bool) -> int:
        """Number of groups at the head of the queue that have a range or can get one."""
        for group in [group for group in self._starts if group.finished]:
            self._allocator.give(self._starts.pop(group))
        count = 0
        for group in waiting:
            if group not in self._starts:
                start = self._allocator.take(self.num_reserved_tokens(group.sequences[0]))
                if start is None:
                    break
                self._starts[group] = start
            count += 1
        return count

    def record_admissions(self, lane: Lane, count: int, *, memory_is_full: bool) -> None:
        """Nothing to record."""

    def num_reserved_tokens(self, sequence: Sequence) -> int:
        """The whole range."""
        return self._num_slots(sequence.num_prompt_tokens, sequence.max_len - sequence.num_prompt_tokens)

    def wakes_at(self, lane: Lane, waiting: WaitingQueue, now: float) -> float | None:
        """None: running sequences cause steps anyway."""
        return None
