"""Who goes first: the order of the waiting queue, and of victims."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.sequence import Sequence, SequenceGroup

OrderKey = tuple[float, ...]


class OrderPolicy(Protocol):
    """An order of service. Smaller keys go first; the largest running key is the first victim."""

    def key(self, group: SequenceGroup) -> OrderKey:
        """The group's place; no two groups have the same."""


class FcfsOrder:
    """First come, first served. A preempted group keeps its place."""

    def key(self, group: SequenceGroup) -> OrderKey:
        """The number of its arrival."""
        return (group.arrival_number,)


class WaitingQueue:
    """Groups that wait, in the policy's order."""

    def __init__(self, policy: OrderPolicy) -> None:
        self._policy = policy
        self._groups: list[SequenceGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups)

    @property
    def head(self) -> SequenceGroup | None:
        """Who goes next."""
        return self._groups[0] if self._groups else None

    def add(self, group: SequenceGroup) -> None:
        """Put a group in its place."""
        insort(self._groups, group, key=self._policy.key)

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out; raises InvariantError if it does not wait."""
        index = bisect_left(self._groups, self._policy.key(group), key=self._policy.key)
        if index == len(self._groups) or self._groups[index] is not group:
            raise InvariantError(f"request {group.spec.request_id} is not in the waiting queue")
        del self._groups[index]


class RunningQueue:
    """Sequences that run on one executor, in the policy's order; victims come from its end."""

    def __init__(self, policy: OrderPolicy) -> None:
        self._policy = policy
        self.sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its place."""
        insort(self.sequences, sequence, key=self._key)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; raises InvariantError if it does not run."""
        index = bisect_left(self.sequences, self._key(sequence), key=self._key)
        if index == len(self.sequences) or self.sequences[index] is not sequence:
            raise InvariantError(f"sequence {sequence.sequence_id} is not running")
        del self.sequences[index]

    def _key(self, sequence: Sequence) -> OrderKey:
        return (*self._policy.key(sequence.group), sequence.sample_index)
