"""Waiting groups by subqueue, with the first of them all at hand.

Admissions and tokens of running sequences change the ranks of subqueues, so ranks are read when the first group is
needed. A heap holds an entry for each subqueue, with its rank and its first key when the entry was made. A rank never
falls while the subqueue has groups, and a first key falls only by `add`, which makes a new entry. So no entry is larger
than its subqueue is now, and the first group is found once the smallest entry is up to date.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace

from scheduler_svc.core.queues.orders import OrderKey, OrderPolicy
from scheduler_svc.core.queues.passed import PassedOver
from scheduler_svc.core.sequences.sequence import SequenceGroup

_Entry = tuple[float, OrderKey, str]
"""Rank and first key of a subqueue, and its name."""
_MIN_STALE = 64
"""Number of entries without effect that the heap may always hold."""


class Subqueues:
    """Groups in one list for each subqueue of a policy, each sorted by the policy's key."""

    def __init__(self, policy: OrderPolicy) -> None:
        self._policy = policy
        self._groups: dict[str, list[SequenceGroup]] = {}
        self._entries: dict[str, _Entry] = {}
        """By subqueue: its entry in the heap. The heap's other entries have no effect."""
        self._heap: list[_Entry] = []

    def __contains__(self, name: object) -> bool:
        return name in self._groups

    def __iter__(self) -> Iterator[str]:
        """The names of the subqueues with groups."""
        return iter(self._groups)

    @property
    def first(self) -> str | None:
        """The subqueue that goes first: that of the smallest rank, then of the smallest first key."""
        if len(self._groups) < 2:
            return next(iter(self._groups), None)
        heap, entries = self._heap, self._entries
        while True:
            entry = heap[0]
            name = entry[2]
            if entries.get(name) is not entry:
                heappop(heap)
                continue
            current = self._entry(name)
            if current == entry:
                return name
            entries[name] = current
            heapreplace(heap, current)

    @property
    def head(self) -> SequenceGroup | None:
        """The first group of the first subqueue."""
        first = self.first
        return None if first is None else self._groups[first][0]

    def head_after(self, passed: PassedOver) -> SequenceGroup | None:
        """The first group in order that is not passed over, near the head of each subqueue."""
        for name in sorted(self._groups, key=self._entry):
            group = passed.first_of(self._groups[name], (self, name))
            if group is not None:
                return group
        return None

    def add(self, group: SequenceGroup) -> None:
        """Insert a group at its place."""
        key, name = self._policy.key, self._policy.subqueue(group)
        groups = self._groups.setdefault(name, [])
        if not groups or key(groups[-1]) < key(group):
            groups.append(group)
        else:
            insort(groups, group, key=key)
        if groups[0] is group:
            self._push(name)

    def remove(self, group: SequenceGroup) -> bool:
        """Remove a group if it is here; returns whether it was."""
        key, name = self._policy.key, self._policy.subqueue(group)
        groups = self._groups.get(name, [])
        index = 0 if groups and groups[0] is group else bisect_left(groups, key(group), key=key)
        if index == len(groups) or groups[index] is not group:
            return False
        del groups[index]
        if not groups:
            del self._groups[name], self._entries[name]
            if not self._groups:
                self._heap.clear()
        return True

    def _entry(self, name: str) -> _Entry:
        return self._policy.rank(name), self._policy.key(self._groups[name][0]), name

    def _push(self, name: str) -> None:
        entry = self._entries[name] = self._entry(name)
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _MIN_STALE:
            self._heap = list(self._entries.values())
            heapify(self._heap)
