"""Which group may take one of the few places for distinct adapters of running groups, and for how long others may
pass it.

A group whose adapter has no place is passed over: groups of adapters that run already, or of none, take no place from
it. So that such adapters do not keep their places for ever, the first group in the order of the queue that finds no
place gets the next turn of the executor. It is passed over by at most MAX_PASSED groups with other adapters, whenever
they arrived, and for at most MAX_PASSED_S. After that no group with another adapter is admitted until it is, but for
those that have run before and were preempted: places become free as running groups end, and the first one is its own.
"""

from __future__ import annotations

from collections.abc import Collection

from scheduler_svc.core.sequences.sequence import SequenceGroup

MAX_PASSED = 32
"""Groups of other adapters that may pass the group whose turn it is."""
MAX_PASSED_S = 1.0
"""For how long, in seconds, they may."""


class AdapterTurns:
    """The turn of one executor."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self.waits: SequenceGroup | None = None
        """The group that has the next turn; None: no group lacks a place."""
        self._since = 0.0
        self._num_passed = 0

    def refresh(self, lane_id: int) -> None:
        """Forget a group that waits for this executor no more."""
        group = self.waits
        if group is not None and not (group.queued and group.placed_on in (None, lane_id)):
            self.waits = None

    def admits(self, group: SequenceGroup, running: Collection[int], now: float) -> bool:
        """Whether a group may be admitted now, as far as adapters go. running: those of the running groups."""
        index = group.spec.adapter_index
        if not index or group is self.waits:
            return not index or index in running or len(running) < self._max_loras
        if self._must_wait(group, now):
            return False
        return index in running or len(running) < self._max_loras

    def pass_over(self, group: SequenceGroup, now: float) -> None:
        """A group found no place: the first one has the next turn."""
        if self.waits is None:
            self.waits, self._since, self._num_passed = group, now, 0

    def on_admitted(self, group: SequenceGroup) -> None:
        """A group, or a part of it, was admitted."""
        waits = self.waits
        if waits is None or not group.spec.adapter_index:
            return
        if group is waits:
            self.waits = None
        elif _passes(group, waits):
            self._num_passed += 1

    def _must_wait(self, group: SequenceGroup, now: float) -> bool:
        """Whether a group may not go before the one whose turn it is."""
        waits = self.waits
        if waits is None or not _passes(group, waits):
            return False
        return self._num_passed >= MAX_PASSED or now - self._since >= MAX_PASSED_S


def _passes(group: SequenceGroup, waits: SequenceGroup) -> bool:
    """Whether a group would begin before the one whose turn it is, with another adapter."""
    return group.spec.adapter_index != waits.spec.adapter_index and not group.was_admitted
