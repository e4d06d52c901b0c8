"""A queue in which tenants take turns: one entry of each tenant after the other, a tenant's own in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

_N = TypeVar("_N", bound=Hashable)
_T = TypeVar("_T")


class TenantTurns(Generic[_N, _T]):
    """Entries that wait; every call takes constant time, but `remove`."""

    def __init__(self) -> None:
        self._queues: dict[_N, deque[_T]] = {}
        """Of each tenant that has entries, the next tenant first."""
        self._num = 0

    def __len__(self) -> int:
        """Return the number of entries."""
        return self._num

    def num_of(self, tenant: _N) -> int:
        """Return the number of a tenant's entries."""
        return len(self._queues.get(tenant, ()))

    def tenants(self) -> Iterable[_N]:
        """Return the tenants that have entries, in the order of their turns."""
        return self._queues

    def add(self, tenant: _N, entry: _T, *, first: bool = False) -> None:
        """Add an entry behind its tenant's others; first: before them."""
        queue = self._queues.setdefault(tenant, deque())
        if first:
            queue.appendleft(entry)
        else:
            queue.append(entry)
        self._num += 1

    def first_of(self, tenant: _N) -> _T:
        """Return a tenant's next entry. Raises KeyError."""
        return self._queues[tenant][0]

    def pop(self) -> tuple[_N, _T]:
        """Remove and return the next entry and its tenant, whose turn comes again after all others.

        Raises StopIteration.
        """
        tenant = next(iter(self._queues))
        return tenant, self.pop_of(tenant)

    def pop_of(self, tenant: _N) -> _T:
        """Remove and return a tenant's next entry; its turn comes again after all others. Raises KeyError."""
        queue = self._queues.pop(tenant)
        entry = queue.popleft()
        if queue:
            self._queues[tenant] = queue
        self._num -= 1
        return entry

    def remove(self, tenant: _N, entry: _T) -> None:
        """Remove an entry; raises ValueError if it is not there."""
        queue = self._queues.get(tenant, deque())
        queue.remove(entry)
        if not queue:
            del self._queues[tenant]
        self._num -= 1
