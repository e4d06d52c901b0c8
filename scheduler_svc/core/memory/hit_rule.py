"""Where a cached prefix may end so that a sequence can go on behind it, beside the KV of layers without windows.

It must have all that the next row reads: in each window group the pages of the last window's blocks, in the pool where
its node has its block. A state is needed at one position alone: the last block must have a snapshot, as a window group
of one block that is read (docs/decisions/0063, 0071).
"""

from __future__ import annotations

from collections.abc import Sequence as Ids

from scheduler_svc.core.kv_groups import GroupSizes
from scheduler_svc.core.memory.paged_tiers import PagedTiers
from scheduler_svc.core.memory.prefix_cache import host_place


class HitRule:
    """Says for chains of cached blocks where hits end."""

    def __init__(self, tiers: PagedTiers, sizes: GroupSizes) -> None:
        self._tiers = tiers
        self._num_read = sizes.extra_reads
        self._order = range(len(self._num_read))
        self._snapshots = len(self._num_read) - 1 if sizes.state_pages else -1
        """Their number among the groups; -1: there are none."""
        if sizes.state_pages:
            # Snapshots are rare: where none is, no window needs to be looked at.
            self._order = self._order[::-1]

    @property
    def num_changes(self) -> int:
        """Grows whenever a hit may end elsewhere than before although no node has changed."""
        return self._tiers.device.num_window_changes

    def last_end(self, places: Ids[int], most: int) -> int:
        """The greatest number of these blocks, at most `most`, behind which a sequence can go on."""
        end, lowest = most, [most] * len(self._num_read)
        # By group: from `lowest` to `end` all blocks have their pages.
        rank = 0
        while end and rank < len(lowest):
            number = self._order[rank]
            first = max(0, end - self._num_read[number])
            if number == self._snapshots:
                missing = self._last_snapshot(places, end)
            else:
                missing = self._last_missing(number, places, first, min(lowest[number], end))
            if missing is None:
                lowest[number] = min(lowest[number], first)
                rank += 1
            else:
                end = lowest[number] = missing
                rank = 0
        return end

    def _last_snapshot(self, places: Ids[int], stop: int) -> int | None:
        """The greatest number of these blocks, below `stop`, of which the last has a snapshot; None: `stop` itself."""
        on_device, on_host = self._tiers.device.windows[-1], self._tiers.host.windows[-1]
        for index in range(stop - 1, -1, -1):
            place = places[index]
            if place in on_device if place >= 0 else host_place(place) in on_host:
                return None if index == stop - 1 else index + 1
        return 0

    def _last_missing(self, number: int, places: Ids[int], first: int, stop: int) -> int | None:
        """The last block in this range that lacks pages of a window group."""
        on_device, on_host = self._tiers.device.windows[number], self._tiers.host.windows[number]
        for index in range(stop - 1, first - 1, -1):
            place = places[index]
            if place not in on_device if place >= 0 else host_place(place) not in on_host:
                return index
        return None
