"""The waiting queue and the running queues, sorted by the scheduling order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.queues.orders import FcfsOrder, OrderKey, OrderPolicy
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup

_arrival_number = attrgetter("arrival_number")
_order_key = attrgetter("order_key")


class WaitingQueue:
    """Waiting groups. A group older than `max_wait_s` goes first in every order, so none starves."""

    def __init__(self, policy: OrderPolicy, max_wait_s: float | None = None) -> None:
        self._policy = policy
        self.max_wait_s = max_wait_s
        self._subqueues: dict[str, list[SequenceGroup]] = {}
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
        return self._subqueues[min(self._subqueues, key=self._subqueue_key)][0]

    def add(self, group: SequenceGroup, *, again: bool = False) -> None:
        """Insert a group at its place; `again`: it ran before."""
        if not again:
            self._policy.on_arrival(group, self._subqueues)
        insort(self._subqueues.setdefault(self._policy.subqueue(group), []), group, key=self._policy.key)
        insort(self._by_arrival, group, key=_arrival_number)
        group.queued = True

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group; raises InvariantError if it is not queued."""
        name = self._policy.subqueue(group)
        subqueue = self._subqueues.get(name, [])
        index = bisect_left(subqueue, self._policy.key(group), key=self._policy.key)
        if index == len(subqueue) or subqueue[index] is not group:
            raise InvariantError(f"request {group.spec.request_id} is not in the waiting queue")
        del subqueue[index]
        if not subqueue:
            del self._subqueues[name]
        del self._by_arrival[bisect_left(self._by_arrival, group.arrival_number, key=_arrival_number)]
        group.queued = False

    def _subqueue_key(self, subqueue: str) -> tuple[float, OrderKey]:
        return self._policy.rank(subqueue), self._policy.key(self._subqueues[subqueue][0])


class RunningQueue:
    """Running sequences of one executor, sorted by the policy's key."""

    def __init__(self, policy: OrderPolicy) -> None:
        self._policy = policy
        self.sequences: list[Sequence] = []

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
        """Insert a sequence; its key is fixed from now on."""
        sequence.order_key = self._key(sequence)
        insort(self.sequences, sequence, key=_order_key)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; raises InvariantError if it is not here."""
        if not self.discard(sequence):
            raise InvariantError(f"sequence {sequence.sequence_id} is not running")

    def discard(self, sequence: Sequence) -> bool:
        """Remove a sequence if it is here; returns whether it was."""
        index = bisect_left(self.sequences, sequence.order_key, key=_order_key)
        if index == len(self.sequences) or self.sequences[index] is not sequence:
            return False
        del self.sequences[index]
        return True

    def _key(self, sequence: Sequence) -> OrderKey:
        return (*self._policy.key(sequence.group), sequence.sample_index)
