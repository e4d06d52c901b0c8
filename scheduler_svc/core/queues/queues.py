"""The waiting queue and the running queues, sorted by the scheduling order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.queues.orders import FcfsOrder, OrderKey, OrderPolicy
from scheduler_svc.core.queues.passed import NOTHING_PASSED, PassedOver
from scheduler_svc.core.queues.subqueues import Subqueues
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup

_arrival_number = attrgetter("arrival_number")
_order_key = attrgetter("order_key")


class WaitingQueue:
    """Waiting groups. A group older than `max_wait_s` goes first in every order, so none starves."""

    def __init__(self, policy: OrderPolicy, max_wait_s: float | None = None) -> None:
        self._policy = policy
        self.max_wait_s = max_wait_s
        self._subqueues = None if type(policy) is FcfsOrder else Subqueues(policy)
        """None: the order is that of arrival."""
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

    def head(self, now: float, passed: PassedOver = NOTHING_PASSED) -> SequenceGroup | None:
        """The group to admit next, without those that are passed over; None also if only they are near the head."""
        if passed:
            return self._head_after(now, passed)
        oldest = self.oldest
        if oldest is None or self._subqueues is None or self.is_overdue(oldest, now):
            return oldest
        return self._subqueues.head

    def _head_after(self, now: float, passed: PassedOver) -> SequenceGroup | None:
        oldest = passed.first_of(self._by_arrival, self)
        if oldest is None or self._subqueues is None or self.is_overdue(oldest, now):
            return oldest
        return self._subqueues.head_after(passed)

    @property
    def is_by_arrival(self) -> bool:
        """Whether the oldest group is always the next one, whatever is admitted."""
        return self._subqueues is None

    def add(self, group: SequenceGroup, *, again: bool = False) -> None:
        """Insert a group at its place; `again`: it ran before."""
        if self._subqueues is not None:
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
        by_arrival = self._by_arrival
        is_oldest = bool(by_arrival) and by_arrival[0] is group
        index = 0 if is_oldest else bisect_left(by_arrival, group.arrival_number, key=_arrival_number)
        if index == len(by_arrival) or by_arrival[index] is not group:
            raise InvariantError(f"request {group.spec.request_id} is not in the waiting queue")
        if self._subqueues is not None:
            self._subqueues.remove(group)
        del by_arrival[index]
        group.queued = False

    def remove_first(self, count: int) -> None:
        """Remove the oldest groups; only in the order of arrival."""
        if self._subqueues is not None:
            raise InvariantError("the oldest groups are not the next ones in this order")
        for group in self._by_arrival[:count]:
            group.queued = False
        del self._by_arrival[:count]


class RunningQueue:
    """Running sequences of one executor, sorted by the policy's key.

    Most join behind all others. So they are kept in a dict, from which each is removed in constant time, and which is
    sorted again only when its order is needed after one has joined elsewhere.
    """

    def __init__(self, policy: OrderPolicy) -> None:
        self._policy = policy
        self._members: dict[Sequence, None] = {}
        self._last_key: OrderKey = ()
        """No member's key is larger."""
        self._is_sorted = True
        self.shared_groups: dict[SequenceGroup, int] = {}
        """Groups of several sequences, each with the number of those that are here."""
        self.num_by_adapter: dict[int, int] = {}
        """Number of sequences here by adapter; a sequence without an adapter does not count."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._members

    @property
    def sequences(self) -> list[Sequence]:
        """All, in order."""
        if not self._is_sorted:
            self._members = dict.fromkeys(sorted(self._members, key=_order_key))
            self._is_sorted = True
            self._last_key = self.last.order_key if self._members else ()
        return list(self._members)

    def num_groups(self, others: Collection[Sequence]) -> int:
        """Number of groups of the sequences here and of a few others."""
        several, count = self.shared_groups, len(self._members)
        if several or others:
            count -= sum(several.values())
            count += len(several.keys() | {sequence.group for sequence in others})
        return count

    @property
    def last(self) -> Sequence:
        """The last one in order, of one or more."""
        return next(reversed(self._members)) if self._is_sorted else self.sequences[-1]

    def victims(self, waiting: WaitingQueue, now: float) -> list[Sequence]:
        """All sequences in preemption order: the first victim first, overdue ones last."""
        if type(self._policy) is FcfsOrder:
            return self.sequences[::-1]  # overdue sequences arrived first, so they are last here
        return sorted(self._members, key=lambda sequence: self._victim_key(sequence, waiting, now), reverse=True)

    def _victim_key(self, sequence: Sequence, waiting: WaitingQueue, now: float) -> OrderKey:
        group = sequence.group
        if waiting.is_overdue(group, now):
            return (0.0, 0.0, float(group.arrival_number), float(sequence.sample_index))
        return (1.0, self._policy.rank(self._policy.subqueue(group)), *sequence.order_key)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence; its key is that of its group, which never changes, and its index."""
        group = sequence.group
        key = sequence.order_key or (*self._policy.key(group), sequence.sample_index)
        sequence.order_key = key
        if key < self._last_key:
            self._is_sorted = False
        else:
            self._last_key = key
        self._members[sequence] = None
        if group.spec.adapter_index:
            self._count_adapter(group, 1)
        if len(group.sequences) > 1:
            self.shared_groups[group] = self.shared_groups.get(group, 0) + 1

    def add_all(self, sequences: list[Sequence]) -> None:
        """Insert sequences of groups that have no others and never ran."""
        key_of = self._policy.key
        for sequence in sequences:
            sequence.order_key = key = (*key_of(sequence.group), sequence.sample_index)
            if key < self._last_key:
                self._is_sorted = False
            else:
                self._last_key = key
            if sequence.group.spec.adapter_index:
                self._count_adapter(sequence.group, 1)
        self._members.update(dict.fromkeys(sequences))

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; raises InvariantError if it is not here."""
        if not self.discard(sequence):
            raise InvariantError(f"sequence {sequence.sequence_id} is not running")

    def remove_all(self, sequences: Iterable[Sequence]) -> None:
        """Remove sequences of groups that have no others; raises InvariantError if one is not here."""
        try:
            for sequence in sequences:
                del self._members[sequence]
                if self.num_by_adapter and sequence.group.spec.adapter_index:
                    self._count_adapter(sequence.group, -1)
        except KeyError as exc:
            raise InvariantError(f"sequence {sequence.sequence_id} is not running") from exc

    def discard(self, sequence: Sequence) -> bool:
        """Remove a sequence if it is here; returns whether it was."""
        if sequence not in self._members:
            return False
        del self._members[sequence]
        if sequence.group.spec.adapter_index:
            self._count_adapter(sequence.group, -1)
        if sequence.group in self.shared_groups:
            self._count_out(sequence.group)
        return True

    def _count_adapter(self, group: SequenceGroup, change: int) -> None:
        index = group.spec.adapter_index
        self.num_by_adapter[index] = self.num_by_adapter.get(index, 0) + change
        if not self.num_by_adapter[index]:
            del self.num_by_adapter[index]

    def _count_out(self, group: SequenceGroup) -> None:
        self.shared_groups[group] -= 1
        if not self.shared_groups[group]:
            del self.shared_groups[group]
