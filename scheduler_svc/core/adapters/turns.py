"""Which group may take one of the few places for distinct adapters of running groups, and for how long others may
pass it.

A group whose adapter has no place is passed over: groups of adapters that run already, or of none, take no place from
it. So that such adapters do not keep their places for ever, the first group in the order of the queue that finds no
place gets the next turn of the executor. It is passed over by at most MAX_PASSED groups with other adapters, whenever
they arrived, and for at most MAX_PASSED_S. After that no group with another adapter is admitted until it is, but for
those that have run before and were preempted: places become free as running groups end, and the first one is its own.

A due adapter, which is not even loaded since all places of loaded ones are in use, bars the executor: no group with an
adapter begins there, until one adapter has no groups that have run and gives its place away. Adapters that were due
before it keep theirs until one group of each has begun, which may.
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
        self.is_barred = False
        """Whether no group with an adapter may begin, so that a due adapter can be loaded."""
        self._may_begin: Collection[int] = ()
        """Adapters whose groups may begin although others are barred: they were due before."""
        self._since = 0.0
        self._num_passed = 0

    def refresh(self, lane_id: int, *, is_barred: bool, may_begin: Collection[int] = ()) -> None:
        """Forget the group if it has stopped waiting for this executor; is_barred: as now, but for these adapters."""
        group, self.is_barred, self._may_begin = self.waits, is_barred, may_begin
        if group is not None and not (group.queued and group.placed_on in (None, lane_id)):
            self.waits = None

    def admits(self, group: SequenceGroup, running: Collection[int], now: float) -> bool:
        """Whether a group may be admitted now, as far as adapters go. running: those of the running groups."""
        index = group.spec.adapter_index
        if not index:
            return True
        is_barred = self.is_barred and not group.was_admitted and index not in self._may_begin
        if is_barred or self._must_wait(group, now):
            return False
        return index in running or len(running) < self._max_loras

    @property
    def is_idle(self) -> bool:
        """Whether no group waits for a place, nor keeps others from beginning."""
        return self.waits is None and not self.is_barred

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
