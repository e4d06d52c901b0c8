"""A cache that forgets what was used least recently, bounded in entries and in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class BoundedCache(Generic[_K, _V]):
    """Not safe between threads. The newest entry stays, even if it alone exceeds the bytes."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[_K, tuple[_V, int]] = OrderedDict()
        self.num_bytes = 0
        """Of all entries, by the sizes given to `put`."""

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def get(self, key: _K) -> _V | None:
        """Return an entry, which counts as a use; None if there is none."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def put(self, key: _K, value: _V, num_bytes: int) -> None:
        """Add or replace an entry of this size, and forget others as far as the bounds ask for it."""
        self.remove(key)
        self._entries[key] = value, num_bytes
        self.num_bytes += num_bytes
        while len(self._entries) > 1 and (len(self) > self._max_entries or self.num_bytes > self._max_bytes):
            _, (_, freed) = self._entries.popitem(last=False)
            self.num_bytes -= freed

    def remove(self, key: _K) -> None:
        """Forget an entry; nothing if there is none."""
        found = self._entries.pop(key, None)
        if found is not None:
            self.num_bytes -= found[1]
