"""All adapters: names, contents, and the requests that use them or wait for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass

from scheduler_svc.core.adapters.events import AdapterCommands, AdapterRegistered
from scheduler_svc.core.adapters.lane_adapters import LaneAdapters
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.sequences.sequence import SequenceGroup

MAX_LOADING = 4
"""Loads that an executor has at once: one reads files while the others wait for it, and a request may come first."""


@dataclass(slots=True)
class KnownAdapter:
    """An adapter that has a name, or that an unfinished request uses."""

    registered: AdapterRegistered
    content_hash: bytes = b""
    """What the first executor answered that loaded it; empty: none has."""
    has_name: bool = True


@dataclass(frozen=True, slots=True)
class Parked:
    """How a group waits outside of the queue."""

    again: bool
    """Whether it was queued before."""
    number: int
    """Grows with each time that a group is put aside."""


class AdapterTable:
    """Adapters by index, and their requests."""

    def __init__(self) -> None:
        self.adapters: dict[int, KnownAdapter] = {}
        self.users: dict[int, int] = {}
        """Number of unfinished groups by adapter, the adapter that was needed first first."""
        self._wanted: dict[int, None] = {}
        """Adapters that are to be loaded once, whether or not a request needs them."""
        self._due: dict[int, None] = {}
        """Adapters that requests have waited for long, until an executor has loaded them."""
        self.has_turn: dict[int, None] = {}
        """Adapters that were due and are loaded: they keep their places until a request with them begins."""
        self.parked: dict[SequenceGroup, Parked] = {}
        """Groups outside of the queue, since no executor has their adapter loaded."""
        self._num_parked = 0
        self.num_changes = 0
        """Grows with each change after which the commands for an executor may be others."""
        self.num_answers = 0
        """Number of answers of executors, of sessions, and of executors that left."""
        self._last_index = 0

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits for an adapter outside of the queue, or one is to be loaded for none."""
        return bool(self.parked or self._wanted)

    def register(self, registered: AdapterRegistered) -> None:
        """Add an adapter; raises InvariantError for an index that was used before."""
        if registered.index <= self._last_index:
            raise InvariantError(f"adapter index {registered.index} is used again")
        self._last_index = registered.index
        self.num_changes += 1
        self.adapters[registered.index] = KnownAdapter(registered)
        if registered.wanted:
            self._wanted[registered.index] = None

    def on_loaded(self, index: int, content_hash: bytes) -> None:
        """An executor has loaded an adapter."""
        self._wanted.pop(index, None)
        if index in self._due:
            del self._due[index]
            self.has_turn[index] = None
        adapter = self.adapters.get(index)
        if adapter is not None:
            adapter.content_hash = content_hash

    def on_due(self, index: int) -> None:
        """A request has waited long for an adapter."""
        if index in self.users:
            self.has_turn.pop(index, None)
            self._due[index] = None
            self.num_changes += 1

    def on_begun(self, index: int) -> None:
        """A group with an adapter was admitted."""
        self.has_turn.pop(index, None)

    def park(self, group: SequenceGroup, *, again: bool) -> None:
        """Put a group aside until an executor has its adapter; again: it was queued before."""
        self._num_parked += 1
        self.parked[group] = Parked(again, self._num_parked)

    def remove(self, index: int) -> None:
        """Take an adapter's name away."""
        adapter = self.adapters.get(index)
        if adapter is not None:
            adapter.has_name = False
            self._wanted.pop(index, None)
            self.num_changes += 1
            self._forget_unused(index)

    def on_added(self, group: SequenceGroup) -> None:
        """An unfinished group uses its adapter."""
        index = group.spec.adapter_index
        if index:
            self.num_changes += index not in self.users
            self.users[index] = self.users.get(index, 0) + 1

    def on_finished(self, group: SequenceGroup) -> None:
        """A group has ended."""
        index = group.spec.adapter_index
        if not index:
            return
        self.parked.pop(group, None)
        self.users[index] -= 1
        if not self.users[index]:
            del self.users[index]
            self._due.pop(index, None)
            self.has_turn.pop(index, None)
            self.num_changes += 1
            self._forget_unused(index)

    def commands(
        self,
        lane: LaneAdapters,
        held: Callable[[], Container[int]],
        users: Callable[[], Collection[int]],
        num_strandings: int,
    ) -> AdapterCommands:
        """What an executor with a session is to load and unload now; recorded as sent.

        Adapters of requests come first, in the order in which they were needed, and take the places of those that no
        request uses, the least recently used first. Then those with names, while there are free places. held: the
        adapters of unfinished groups that have run on this executor: due ones may take the places of all others, but
        of those that were due before and have not begun. users: those of `users` that this executor is to have.
        num_strandings: grows with each change of these that no event of adapters brings.
        """
        if not lane.max_loras or not (lane.take_change(self.num_changes + num_strandings) or self.bars(lane)):
            return AdapterCommands()
        used = users()
        names = {index: None for index, adapter in self.adapters.items() if adapter.has_name}
        lane.forget_errors(self.adapters)
        unloads = lane.to_unload(self.users, names)
        wanted = {**self._due, **dict.fromkeys(used), **self._wanted}
        needed = [index for index in wanted if lane.state(index) is None]
        next_loads = needed[: max(0, MAX_LOADING - lane.num_loading)]
        num_free = lane.num_places + len(unloads) + lane.num_unloading
        unused = [index for index in lane.least_recently_used(used) if index not in unloads]
        unloads += unused[: max(0, len(next_loads) - num_free)]
        num_due_short = sum(index in self._due for index in next_loads) - num_free - len(unused)
        if num_due_short > 0:
            kept = {*self.has_turn, *unloads}
            waiting = [index for index in lane.least_recently_used(held()) if index not in kept]
            unloads += waiting[:num_due_short]
        most = max(0, min(MAX_LOADING - lane.num_loading, lane.num_places))
        loads = needed[:most]
        if not needed:
            loads = [index for index in names if lane.state(index) is None][:most]
        for index in unloads:
            lane.start_unload(index)
        for index in loads:
            lane.start_load(index)
        return AdapterCommands(tuple(unloads), tuple(self.adapters[index].registered for index in loads))

    def bars(self, lane: LaneAdapters) -> bool:
        """Whether no group with an adapter may begin on an executor: a due adapter has no place, and none is coming."""
        is_short = lane.max_loras > 0 and any(lane.state(index) is None for index in self._due)
        return is_short and lane.num_places + lane.num_unloading <= 0

    def awaits_place(self, lane: LaneAdapters, index: int) -> bool:
        """Whether a due adapter is not loaded on an executor since others have the places, which it gets in its turn.

        Not while so many are being loaded that none begins: their loads may never end.
        """
        lacks_place = lane.state(index) is None and lane.num_places <= 0
        return index in self._due and lacks_place and lane.num_loaded > 0 and lane.num_loading < MAX_LOADING

    def check_integrity(self, groups: Iterable[SequenceGroup]) -> None:
        """Check the counts of requests and the parked groups; raises InvariantError."""
        users: dict[int, int] = {}
        for group in groups:
            if group.spec.adapter_index:
                users[group.spec.adapter_index] = users.get(group.spec.adapter_index, 0) + 1
        if users != self.users:
            raise InvariantError("the requests of adapters are miscounted")
        if any(group.queued or not group.spec.adapter_index for group in self.parked):
            raise InvariantError("a group waits for its adapter although it is queued or has none")

    def _forget_unused(self, index: int) -> None:
        if not self.adapters[index].has_name and index not in self.users:
            del self.adapters[index]
