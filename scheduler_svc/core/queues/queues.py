"""The waiting queue and the running queues, sorted by the scheduling order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.queues.orders import FcfsOrder, OrderKey, OrderPolicy
from scheduler_svc.core.queues.subqueues import Subqueues
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup

_arrival_number = attrgetter("arrival_number")
_order_key = attrgetter("order_key")


class WaitingQueue:
    """Waiting groups. A group older than `max_wait_s` goes first in every order, so none starves."""

    def __init__(self, policy: OrderPolicy, max_wait_s: float | None = None) -> None:
        self._policy = policy
        self.max_wait_s = max_wait_s
        self._subqueues = Subqueues(policy)
        self._by_arrival: list[SequenceGroup] = []

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """All groups by arrival."""
        return iter(self._by_arrival)

    def is_overdue(self, group: SequenceGroup, now: float) -> bool:
        """Whether a group arrived `max_wait_s` or longer ago."""
        return self.max_wait_s is not None and now - group.arrival >= self.max_wait_s

    @property
    def overdue_at(self) -> float | None:
        """When the oldest group becomes overdue."""
        if self.max_wait_s is None or not self._by_arrival:
            return None
        return self._by_arrival[0].arrival + self.max_wait_s

    @property
    def oldest(self) -> SequenceGroup | None:
        """The group that arrived first."""
        return self._by_arrival[0] if self._by_arrival else None

    def head(self, now: float) -> SequenceGroup | None:
        """The group to admit next."""
        oldest = self.oldest
        if oldest is None or self.is_overdue(oldest, now):
            return oldest
        return self._subqueues.head

    def add(self, group: SequenceGroup, *, again: bool = False) -> None:
        """Insert a group at its place; `again`: it ran before."""
        if not again:
            self._policy.on_arrival(group, self._subqueues)
        self._subqueues.add(group)
        by_arrival = self._by_arrival
        if not by_arrival or by_arrival[-1].arrival_number < group.arrival_number:
            by_arrival.append(group)
        else:
            insort(by_arrival, group, key=_arrival_number)
        group.queued = True

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group; raises InvariantError if it is not queued."""
        if not self._subqueues.remove(group):
            raise InvariantError(f"request {group.spec.request_id} is not in the waiting queue")
        by_arrival = self._by_arrival
        is_oldest = by_arrival[0] is group
        del by_arrival[0 if is_oldest else bisect_left(by_arrival, group.arrival_number, key=_arrival_number)]
        group.queued = False


class RunningQueue:
    """Running sequences of one executor, sorted by the policy's key."""

    def __init__(self, policy: OrderPolicy) -> None:
        self._policy = policy
        self.sequences: list[Sequence] = []
        self.shared_groups: dict[SequenceGroup, int] = {}
        """Groups of several sequences, each with the number of those that are here."""

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def victims(self, waiting: WaitingQueue, now: float) -> list[Sequence]:
        """All sequences in preemption order: the first victim first, overdue ones last."""
        if type(self._policy) is FcfsOrder:
            return self.sequences[::-1]  # overdue sequences arrived first, so they are last here
        return sorted(self.sequences, key=lambda sequence: self._victim_key(sequence, waiting, now), reverse=True)

    def _victim_key(self, sequence: Sequence, waiting: WaitingQueue, now: float) -> OrderKey:
        group = sequence.group
        if waiting.is_overdue(group, now):
            return (0.0, 0.0, float(group.arrival_number), float(sequence.sample_index))
        return (1.0, self._policy.rank(self._policy.subqueue(group)), *sequence.order_key)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence; its key is that of its group, which never changes, and its index."""
        group, sequences = sequence.group, self.sequences
        key = sequence.order_key or (*self._policy.key(group), sequence.sample_index)
        sequence.order_key = key
        if not sequences or sequences[-1].order_key < key:
            sequences.append(sequence)
        else:
            insort(sequences, sequence, key=_order_key)
        if len(group.sequences) > 1:
            self.shared_groups[group] = self.shared_groups.get(group, 0) + 1

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; raises InvariantError if it is not here."""
        if not self.discard(sequence):
            raise InvariantError(f"sequence {sequence.sequence_id} is not running")

    def discard(self, sequence: Sequence) -> bool:
        """Remove a sequence if it is here; returns whether it was."""
        sequences = self.sequences
        if sequences and sequences[0] is sequence:
            index = 0
        else:
            index = bisect_left(sequences, sequence.order_key, key=_order_key)
        if index == len(sequences) or sequences[index] is not sequence:
            return False
        del sequences[index]
        if sequence.group in self.shared_groups:
            self._count_out(sequence.group)
        return True

    def _count_out(self, group: SequenceGroup) -> None:
        self.shared_groups[group] -= 1
        if not self.shared_groups[group]:
            del self.shared_groups[group]
