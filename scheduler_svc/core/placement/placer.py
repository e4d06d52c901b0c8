"""Places waiting groups on lanes, and gives each lane its next group to admit.

There is one waiting queue. With several lanes each waiting group is placed on one of them, and that lane admits its
groups in the queue's order: it never passes its own head over. A lane may admit groups of its own while the head of the
whole queue waits for another lane; so the head is passed over, but for MAX_PASS_OVER_S at most: a lane with room for it
then admits it first, wherever it is placed. A lane without a group of its own takes over the head of another lane if it
is expected to serve it sooner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.placement.candidates import (
    able_lanes,
    has_adapter,
    holding_lanes,
    kinds_of,
    may_continue,
    takes_groups,
)
from scheduler_svc.core.placement.lane_queue import LaneQueue
from scheduler_svc.core.placement.lookups import KnownHits, PlacementLookups, first_waiting
from scheduler_svc.core.policies.placement import Candidate, NeededTokens, PlacementPolicy, expected_s
from scheduler_svc.core.queues.orders import OrderPolicy
from scheduler_svc.core.queues.passed import NOTHING_PASSED, PassedOver
from scheduler_svc.core.queues.queues import WaitingQueue
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.types import SequenceState

MAX_PASS_OVER_S = 1.0
"""For how long after its arrival a lane with room for the head of the queue may pass it over."""


class Placer:
    """Which lane each waiting group waits for. Without a policy, or with one lane, any lane takes any group."""

    def __init__(
        self, waiting: WaitingQueue, lanes: Mapping[int, Lane], order: OrderPolicy, policy: PlacementPolicy | None
    ) -> None:
        self._waiting = waiting
        self._lanes = lanes
        self._order = order
        self._policy = policy
        self._is_active = False
        """Whether groups are placed: there are several lanes, and a policy."""
        self._kinds: list[list[Lane]] = []
        """All lanes, by what they can hold."""
        self._queues: dict[int, LaneQueue] = {}
        """By lane: the groups placed there."""
        self._open: list[LaneQueue] = []
        """By executor, for each lane that takes groups now."""
        self._candidates: list[Candidate] = []
        """The candidates of these."""
        self._hits: dict[SequenceGroup, KnownHits] = {}
        """Of each placed group: what prefix caches had of it when it was placed."""
        self._asked: frozenset[int] = frozenset()
        """The executors whose caches are asked for groups that are placed now."""
        self._lookups = PlacementLookups()
        self._unplaced: dict[SequenceGroup, None] = {}
        """Groups to be placed by the next plans."""
        self._stranded: dict[SequenceGroup, None] = {}
        """Groups that no open lane can hold: they wait for a lane to open, or to load their adapter."""
        self.num_strandings = 0
        """Grows with each of them."""

    # --- what happens to groups and lanes ----------------------------------------------------------------------------

    def on_queued(self, group: SequenceGroup) -> None:
        """A group was put into the waiting queue."""
        if self._is_active:
            self._unplaced[group] = None

    def on_left(self, group: SequenceGroup) -> None:
        """A group is about to leave the waiting queue."""
        if group.placed_on is not None:
            self._withdraw(group)
        self._unplaced.pop(group, None)
        self._lookups.forget(group)
        self._stranded.pop(group, None)

    def on_bound(self, group: SequenceGroup, lane: Lane) -> None:
        """A part of a group runs on a lane now: the rest waits for the same one."""
        if self._is_active and group.placed_on != lane.executor_id:
            self.replace(group)

    def replace(self, group: SequenceGroup) -> None:
        """Place a waiting group again."""
        if group.placed_on is not None:
            self._withdraw(group)
        if self._is_active:
            self._unplaced[group] = None

    def on_adapter_loaded(self) -> None:
        """A lane has loaded an adapter: groups that no open lane could hold, or a draining one alone, may run there."""
        self._unplaced |= self._stranded
        self._stranded.clear()
        for queue in self._queues.values():
            for group in list(queue) if queue.lane.draining else ():
                self.replace(group)

    def on_lane_used(self, executor_id: int) -> None:
        """A lane's sequences, blocks or plans in flight have changed, or what is measured of it."""
        if (queue := self._queues.get(executor_id)) is not None:
            queue.on_lane_used()

    def on_lane_changed(self, executor_id: int) -> None:
        """A lane has opened, closed, come or gone: place again what waits for it, and what waited for any lane."""
        self._is_active = self._policy is not None and len(self._lanes) > 1
        for lane_id, queue in self._queues.items():
            # A single lane that is left takes its groups from the queue of all, and others may take those of a drain.
            lane = self._lanes.get(lane_id)
            if executor_id == lane_id or not self._is_active or (lane is not None and lane.draining):
                for group in list(queue):
                    self._withdraw(group)
                    self._unplaced[group] = None
        self._forget_hits(executor_id)
        self._lookups.clear()
        self._unplaced |= self._stranded
        self._stranded.clear()
        if self._is_active:
            self._unplaced |= {group: None for group in self._waiting if group.placed_on is None}
        else:
            self._unplaced.clear()
        self._kinds = kinds_of(self._lanes.values())
        self._queues = {lane_id: self._queue_of(lane) for lane_id, lane in self._lanes.items()}
        self._open = [queue for _, queue in sorted(self._queues.items()) if takes_groups(queue.lane)]
        self._candidates = [queue.candidate for queue in self._open]
        self._asked = frozenset(queue.lane.executor_id for queue in self._open)

    # --- what lanes need ---------------------------------------------------------------------------------------------

    def num_waiting(self, executor_id: int) -> int:
        """Number of groups that wait for this lane; with one lane all."""
        if not self._is_active:
            return len(self._waiting)
        return self.num_placed(executor_id)

    def num_placed(self, executor_id: int) -> int:
        """Number of groups that are placed on this lane."""
        return len(self._queues.get(executor_id, ()))

    @property
    def strands_adapters(self) -> bool:
        """Whether no open lane can hold some group with an adapter, which one may have that cannot hold it."""
        return any(group.spec.adapter_index for group in self._stranded)

    @property
    def num_unplaced(self) -> int:
        """Number of groups that the next plans, of whichever lanes, will place."""
        return len(self._unplaced)

    def place(self, now: float) -> None:
        """Place the next groups that are not placed yet, as far as their lookups go in one plan."""
        self._lookups.start_plan()
        while self._unplaced and self._lookups.may_go_on:
            group = next(iter(self._unplaced))
            hits = self._lookups.hits(group, self._open)
            if hits is None:
                return
            del self._unplaced[group]
            needed = NeededTokens(_num_tokens(group), hits)
            found = self._choice(group, needed, now)
            if found is None:
                self._stranded[group] = None
                self.num_strandings += 1
            else:
                self._hits[group] = KnownHits(hits, self._asked)
                self._queues[found.executor_id].add(group, needed.num_tokens - self._num_hits(group, found))

    def admissible(self, lane: Lane, now: float, most: int) -> list[SequenceGroup]:
        """Groups that a plan of this lane may admit, the next one first, the others by arrival; `most` or two more."""
        head, own = self._waiting.head(now), self.own_head(lane, now)
        queue = self._queues.get(lane.executor_id, ()) if self._is_active else self._waiting
        heads = [group for group in (own, head) if group is not None]
        return [*dict.fromkeys([*heads, *islice(queue, most)])]

    def heads(self, lane: Lane, now: float, passed: PassedOver) -> Iterator[SequenceGroup]:
        """The groups that a lane may admit next. It takes, or stops at, the first group that is not in `passed`.

        `passed`: groups of other lanes that this lane has no room for now, and groups whose adapters have no place.
        """
        head = self._waiting.head(now)
        if head is None:
            return
        if not self._is_active:
            own = self.own_head(lane, now, passed)
            found = self._in_order(lane, head, passed) if len(self._lanes) > 1 else own
            yield from () if found is None else (found,)
            return
        if self._is_overdue(head, now) and head not in passed and self._may_move(head, lane):
            yield head
        own = self.own_head(lane, now, passed)
        if own is not None:
            yield own
        elif self._rebalances:
            yield from (group for group in self._sooner_here(lane, now) if group not in passed)

    def own_head(self, lane: Lane, now: float, passed: PassedOver = NOTHING_PASSED) -> SequenceGroup | None:
        """The next of the groups that wait for this lane; with one lane, or without placement, the next of all.

        A single lane that drains only takes back what it has preempted.
        """
        if not self._is_active:
            head = self._waiting.head(now, passed)
            if lane.draining and head is not None and len(self._lanes) == 1:
                ran_here = (group for group in (head, *self._waiting) if group.lane_id == lane.executor_id)
                return next((group for group in ran_here if group not in passed), None)
            return head
        queue = self._queues.get(lane.executor_id)
        return None if queue is None else queue.head(now, passed)

    def by_arrival(self, lane: Lane, now: float) -> Iterable[SequenceGroup]:
        """In the order of arrival, what `heads` gives first each time, if the lane takes all of it.

        Without what the lane would take over because it is idle.
        """
        if lane.draining:
            return ()
        if not self._is_active:
            return self._waiting if len(self._lanes) == 1 else ()
        return self._by_arrival(lane, now)

    def _by_arrival(self, lane: Lane, now: float) -> Iterator[SequenceGroup]:
        taken: set[SequenceGroup] = set()
        own, oldest = iter(self._queues[lane.executor_id]), iter(self._waiting)
        head = next(oldest, None)
        while True:
            while head in taken:
                head = next(oldest, None)
            if head is None:
                return
            if self._is_overdue(head, now) and self._may_move(head, lane):
                found: SequenceGroup | None = head
            else:
                found = next((group for group in own if group not in taken), None)
            if found is None:
                return
            taken.add(found)
            yield found

    def is_own(self, group: SequenceGroup, lane: Lane) -> bool:
        """Whether a lane stops at a group that it has no room for, rather than passing it over."""
        if self._is_active:
            return group.placed_on == lane.executor_id
        # A batch takes a group that is swapped out on another lane without its KV.
        return len(self._lanes) == 1 or self._holder(group) in (None, lane)

    def wakes_at(self, now: float) -> float | None:
        """When a lane without work may find a group; None: not by the passing of time."""
        if self._unplaced:
            return now
        head = self._waiting.head(now) if self._is_active and self._rebalances else None
        return None if head is None or (due := head.arrival + MAX_PASS_OVER_S) <= now else due

    def check_integrity(self) -> None:
        """Check that each waiting group is placed, to be placed or stranded; raises InvariantError."""
        placed = [group for queue in self._queues.values() for group in queue]
        if self._hits.keys() != set(placed):
            raise InvariantError("prefix hits are kept of a group that is not placed, or a placed one has none")
        self._lookups.check_integrity(self._unplaced)
        found = [*placed, *self._unplaced, *self._stranded]
        if self._is_active and sorted(map(id, found)) != sorted(map(id, self._waiting)):
            raise InvariantError("a waiting group is not placed, or placed twice")
        if not self._is_active and found:
            raise InvariantError("a group is placed although there is one lane")
        for queue in self._queues.values():
            queue.check_integrity()
        if self._open != [queue for _, queue in sorted(self._queues.items()) if takes_groups(queue.lane)]:
            raise InvariantError("placement knows other open lanes than there are")
        if {lane_id: queue.lane for lane_id, queue in self._queues.items()} != self._lanes:
            raise InvariantError("placement knows other lanes than there are")
        if self._is_active != (self._policy is not None and len(self._lanes) > 1):
            raise InvariantError("groups are placed although there is one lane, or are not although there are several")
        if self._kinds != kinds_of(self._lanes.values()):
            raise InvariantError("placement knows other limits of lanes than they have")

    # --- placing -----------------------------------------------------------------------------------------------------

    @property
    def _rebalances(self) -> bool:
        return self._policy is not None and self._policy.rebalances

    def _is_overdue(self, head: SequenceGroup, now: float) -> bool:
        """Whether a lane with room for the head of the queue may pass it over no longer."""
        return self._rebalances and head.arrival + MAX_PASS_OVER_S <= now

    def _choice(self, group: SequenceGroup, needed: NeededTokens, now: float) -> Lane | None:
        """The lane to place a group on; None: no open lane can hold it."""
        assert self._policy is not None
        holder, able = self._holder(group), self._able_lanes(group)
        if holder is not None and (group.is_bound or (holder in able and not holder.draining)):
            return holder
        candidates = self._candidates
        if len(able) < len(self._lanes):
            ids = {lane.executor_id for lane in able}
            candidates = [each for each in candidates if each.lane.executor_id in ids]
        if not candidates:
            # What no other lane can hold ends on the draining one, where it ran.
            former = (lane for lane in able if lane.executor_id == group.lane_id and lane.is_open)
            candidates = [Candidate(lane) for lane in former]
        return self._policy.choose(group, candidates, needed, now).lane if candidates else None

    def _able_lanes(self, group: SequenceGroup) -> list[Lane]:
        """The lanes that can hold a group; if none ever can, the largest pool, which takes it as far as that goes."""
        able = able_lanes(group, self._kinds)
        if able or holding_lanes(group, self._kinds):
            return able
        lanes = [lane for lane in self._lanes.values() if takes_groups(lane)] or self._lanes.values()
        ready = [lane for lane in lanes if has_adapter(lane, group) and may_continue(lane, group)]
        return [max(ready, key=lambda lane: lane.spec.num_blocks)] if ready else []

    def _holder(self, group: SequenceGroup, *, swapped: bool = True) -> Lane | None:
        """The lane that holds something of a group; without `swapped`, something other than swapped KV."""
        holder = self._lanes.get(group.lane_id) if group.lane_id is not None else None
        return holder if holder is not None and holder.holds(group, swapped=swapped) else None

    def _queue_of(self, lane: Lane) -> LaneQueue:
        """The queue of a lane, which may be a new one in place of a lost one, and may have changed."""
        queue = self._queues.get(lane.executor_id)
        if queue is None or queue.lane is not lane:
            queue = LaneQueue(lane, self._order, self._waiting.max_wait_s)
        queue.on_lane_changed()
        return queue

    def _num_hits(self, group: SequenceGroup, lane: Lane) -> int:
        """Tokens of a placed group's prefix that the lane's cache had when the group was placed.

        Of a lane that was not asked then: that it has now, looked up once.
        """
        tokens, asked = self._hits[group]
        found = tokens.get(lane.executor_id)
        if found is not None:
            return found
        if lane.executor_id in asked:
            return 0
        first = first_waiting(group)
        found = tokens[lane.executor_id] = 0 if first is None else lane.blocks.num_cached_tokens(first)
        return found

    def _forget_hits(self, executor_id: int) -> None:
        """A lane may have lost its cache: it counts as one that was not asked."""
        others: dict[frozenset[int], frozenset[int]] = {}
        for group, (tokens, asked) in self._hits.items():
            tokens.pop(executor_id, None)
            if asked not in others:
                others[asked] = asked - {executor_id}
            self._hits[group] = KnownHits(tokens, others[asked])

    def _withdraw(self, group: SequenceGroup) -> None:
        assert group.placed_on is not None
        self._queues[group.placed_on].remove(group)
        self._hits.pop(group, None)

    # --- taking over -------------------------------------------------------------------------------------------------

    def _sooner_here(self, lane: Lane, now: float) -> list[SequenceGroup]:
        """The heads of other lanes that this lane is expected to serve sooner, those that gain most first."""
        gains: list[tuple[float, int, SequenceGroup]] = []
        here = Candidate(lane)
        for queue in self._queues.values():
            group = queue.head(now)
            if queue.lane is lane or group is None or not self._may_move(group, lane):
                continue
            num_tokens = _num_tokens(group)
            there = Candidate(queue.lane, seen=queue.candidate.seen or queue.candidate.look())
            there_s = expected_s(there, num_tokens - self._num_hits(group, queue.lane), now)
            gain = there_s - expected_s(here, num_tokens - self._num_hits(group, lane), now)
            if gain > 0:
                gains.append((gain, -group.arrival_number, group))
        return [group for _, _, group in sorted(gains, reverse=True)]

    def _may_move(self, group: SequenceGroup, lane: Lane) -> bool:
        """Whether a group may run on this lane now: no other lane holds any of it but swapped KV."""
        if group.placed_on == lane.executor_id:
            return True
        holder = self._holder(group, swapped=False)
        if holder is lane and group.is_bound:
            return True
        return not lane.draining and holder in (None, lane) and lane in self._able_lanes(group)

    def _in_order(self, lane: Lane, head: SequenceGroup, passed: PassedOver) -> SequenceGroup | None:
        """The first group of the queue, by the order and then by arrival, that may run on this lane."""
        groups = (group for group in (head, *self._waiting) if group not in passed)
        return next((group for group in groups if self._may_move(group, lane)), None)


def _num_tokens(group: SequenceGroup) -> int:
    """Number of tokens whose KV its waiting sequences need: of each if they have output, else of the prompt once."""
    return sum([each.num_tokens for each in group.waiting_sequences if each.state is SequenceState.WAITING])
