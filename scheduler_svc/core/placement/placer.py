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
from scheduler_svc.core.memory.prefix_cache import Key
from scheduler_svc.core.memory.prefix_lookups import first_block
from scheduler_svc.core.placement.candidates import (
    able_lanes,
    has_adapter,
    holding_lanes,
    kinds_of,
    may_continue,
    takes_groups,
)
from scheduler_svc.core.placement.lane_queue import LaneQueue
from scheduler_svc.core.policies.placement import NeededTokens, PlacementPolicy, candidate_of, expected_s
from scheduler_svc.core.queues.orders import OrderPolicy
from scheduler_svc.core.queues.passed import NOTHING_PASSED, PassedOver
from scheduler_svc.core.queues.queues import WaitingQueue
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import SequenceState

MAX_PASS_OVER_S = 1.0
"""For how long after its arrival a lane with room for the head of the queue may pass it over."""
_MAX_LOOKED_UP = 16_384
"""Tokens that one plan looks up for placements, in 0.5 ms, or 1 ms in cold memory: the next plans go on with the rest.
"""
_MIN_LOOKED_UP = 128
"""Tokens whose lookup takes as long as what else there is to do for a cached prefix on one lane …"""
_PLACED_TOKENS = 512
"""… for a group …"""
_CANDIDATE_TOKENS = 32
"""… and for each lane that it may be placed on."""
_MIN_BLOCK_TOKENS = 16
"""Looking up a smaller block takes as long as one of this size."""
_WHOLE = 1 << 62
"""In place of a number of blocks: the lookup is complete."""


class Placer:
    """Which lane each waiting group waits for. Without a policy, or with one lane, any lane takes any group."""

    def __init__(
        self, waiting: WaitingQueue, lanes: Mapping[int, Lane], order: OrderPolicy, policy: PlacementPolicy | None
    ) -> None:
        self._waiting = waiting
        self._lanes = lanes
        self._order = order
        self._policy = policy
        self._kinds: list[list[Lane]] = []
        """All lanes, by what they can hold."""
        self._queues: dict[int, LaneQueue] = {}
        """By lane: the groups placed there."""
        self._open: list[LaneQueue] = []
        """Those of lanes that take groups now, by executor."""
        self._hits: dict[SequenceGroup, dict[int, int]] = {}
        """Of each placed group, by lane: the tokens that its prefix cache had when the group was placed."""
        self._looked_up: dict[SequenceGroup, dict[int, int]] = {}
        """Of the group to be placed next, once its lookups have begun: by lane that has its first block, the blocks
        looked up so far.

        It does not depend on what lookups are remembered, which a replay does not know.
        """
        self._unplaced: dict[SequenceGroup, None] = {}
        """Groups to be placed by the next plans."""
        self._stranded: dict[SequenceGroup, None] = {}
        """Groups that no open lane can hold: they wait for a lane to open."""

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
        self._looked_up.pop(group, None)
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
        """A lane has loaded an adapter: groups that no open lane could hold may run there."""
        self._unplaced |= self._stranded
        self._stranded.clear()

    def on_lane_used(self, executor_id: int) -> None:
        """A lane's sequences, blocks or plans in flight have changed, or what is measured of it."""
        if (queue := self._queues.get(executor_id)) is not None:
            queue.on_lane_used()

    def on_lane_changed(self, executor_id: int | None = None) -> None:
        """A lane has opened, closed, come or gone: place again what waits for it, and what waited for any lane.

        None: all lanes may have changed.
        """
        for lane_id, queue in self._queues.items():
            # A single lane that is left takes its groups from the queue of all, and others may take those of a drain.
            lane = self._lanes.get(lane_id)
            if executor_id in (None, lane_id) or not self._is_active or (lane is not None and lane.draining):
                for group in list(queue):
                    self._withdraw(group)
                    self._unplaced[group] = None
        for hits in self._hits.values():
            for lane_id in [*hits] if executor_id is None else [executor_id]:
                hits.pop(lane_id, None)
        self._looked_up.clear()
        self._unplaced |= self._stranded
        self._stranded.clear()
        if self._is_active:
            self._unplaced |= {group: None for group in self._waiting if group.placed_on is None}
        else:
            self._unplaced.clear()
        self._kinds = kinds_of(self._lanes.values())
        self._queues = {lane_id: self._queue_of(lane) for lane_id, lane in self._lanes.items()}
        self._open = [queue for _, queue in sorted(self._queues.items()) if takes_groups(queue.lane)]

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
    def num_unplaced(self) -> int:
        """Number of groups that the next plans, of whichever lanes, will place."""
        return len(self._unplaced)

    def place(self, now: float) -> None:
        """Place the next groups that are not placed yet, as far as their lookups go in one plan."""
        num_left = _MAX_LOOKED_UP
        while self._unplaced and num_left > 0:
            group = next(iter(self._unplaced))
            num_left = self._look_up(group, num_left)
            if group in self._looked_up:
                return
            del self._unplaced[group]
            found = self._choice(group, now)
            if found is None:
                del self._hits[group]
                self._stranded[group] = None
            else:
                num_hits = self._num_hits(group, found)
                self._queues[found.executor_id].add(group, _num_tokens(group) - num_hits)

    def admissible(self, lane: Lane, now: float, most: int) -> list[SequenceGroup]:
        """Groups that a plan of this lane may admit, the next one first, the others by arrival; `most` or two more."""
        head, own = self._waiting.head(now), self.own_head(lane, now)
        queue = self._queues.get(lane.executor_id, ()) if self._is_active else self._waiting
        heads = [group for group in (own, head) if group is not None]
        return [*dict.fromkeys([*heads, *islice(queue, most)])]

    def heads(self, lane: Lane, now: float, passed: PassedOver) -> Iterator[SequenceGroup]:
        """The groups that a lane may admit next, one of which it takes or stops at: the first that is not in `passed`.

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
        is_overdue = self._rebalances and head.arrival + MAX_PASS_OVER_S <= now
        if is_overdue and head not in passed and self._may_move(head, lane):
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
        """The groups that a lane takes one after the other in the order of arrival; none if others may go first."""
        if lane.draining:
            return ()
        if not self._is_active:
            return self._waiting if len(self._lanes) == 1 else ()
        oldest = self._waiting.oldest
        if oldest is None or (self._rebalances and oldest.arrival + MAX_PASS_OVER_S <= now):
            return ()
        return self._queues[lane.executor_id]

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
        if any(group not in self._queues[group.placed_on] for group in placed if group.placed_on is not None):
            raise InvariantError("a group is in the queue of another lane than the one that it is placed on")
        if self._hits.keys() != set(placed):
            raise InvariantError("prefix hits are kept of a group that is not placed, or a placed one has none")
        if not self._looked_up.keys() <= self._unplaced.keys():
            raise InvariantError("lookups have begun of a group that is not to be placed")
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
        if self._kinds != kinds_of(self._lanes.values()):
            raise InvariantError("placement knows other limits of lanes than they have")

    # --- placing -----------------------------------------------------------------------------------------------------

    @property
    def _is_active(self) -> bool:
        return self._policy is not None and len(self._lanes) > 1

    @property
    def _rebalances(self) -> bool:
        return self._policy is not None and self._policy.rebalances

    def _look_up(self, group: SequenceGroup, num_left: int) -> int:
        """Go on with the lookups of a group; returns how many of `num_left` tokens are left.

        The group is in `_looked_up` until they are complete.
        """
        first = _first_waiting(group)
        looked_up = self._looked_up.get(group)
        if looked_up is None:
            num_left -= _PLACED_TOKENS + len(self._open) * _CANDIDATE_TOKENS
            looked_up = dict.fromkeys([] if first is None else _with_first_block(first, self._open), 0)
            self._looked_up[group] = looked_up
        for executor_id, known in looked_up.items():
            assert first is not None
            if not known:
                num_left -= _MIN_LOOKED_UP
            lane = self._lanes[executor_id]
            block_tokens = max(_MIN_BLOCK_TOKENS, lane.spec.block_size)
            while known < _WHOLE:
                if num_left <= 0:
                    return 0
                most = known + max(1, num_left // block_tokens)
                found = lane.blocks.look_up(first, most)
                num_left -= max(0, found - known) * block_tokens
                known = looked_up[executor_id] = found if found == most else _WHOLE
        hits = self._hits.setdefault(group, {})
        for executor_id in looked_up:
            assert first is not None
            hits[executor_id] = self._lanes[executor_id].blocks.num_cached_tokens(first)
        del self._looked_up[group]
        return num_left

    def _choice(self, group: SequenceGroup, now: float) -> Lane | None:
        """The lane to place a group on; None: no open lane can hold it."""
        assert self._policy is not None
        holder, able = self._holder(group), self._able_lanes(group)
        if holder is not None and (group.is_bound or (holder in able and not holder.draining)):
            return holder
        if len(able) == len(self._lanes):
            queues = self._open
        else:
            queues = [queue for queue in self._open if queue.lane in able]
        if queues:
            needed = NeededTokens(_num_tokens(group), self._hits[group])
            return self._policy.choose(group, [each.seen or each.look() for each in queues], needed, now).lane
        # What no other lane can hold ends on the draining one, where it ran.
        return next((lane for lane in able if lane.executor_id == group.lane_id and lane.is_open), None)

    def _able_lanes(self, group: SequenceGroup) -> list[Lane]:
        """The lanes that can hold a group; if none ever can, the largest pool, which takes it as far as that goes."""
        able = able_lanes(group, self._kinds)
        if able or holding_lanes(group, self._kinds):
            return able
        lanes = [queue.lane for queue in self._open] or self._lanes.values()
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
        """Tokens of its first waiting sequence that the lane's prefix cache has, or had when the group was placed.

        Looked up once, as that takes time in proportion to the prefix.
        """
        hits = self._hits[group]
        found = hits.get(lane.executor_id)
        if found is None:
            first = _first_waiting(group)
            found = hits[lane.executor_id] = 0 if first is None else lane.blocks.num_cached_tokens(first)
        return found

    def _withdraw(self, group: SequenceGroup) -> None:
        assert group.placed_on is not None
        self._queues[group.placed_on].remove(group)
        self._hits.pop(group, None)

    # --- taking over -------------------------------------------------------------------------------------------------

    def _sooner_here(self, lane: Lane, now: float) -> list[SequenceGroup]:
        """The heads of other lanes that this lane is expected to serve sooner, those that gain most first."""
        gains: list[tuple[float, int, SequenceGroup]] = []
        here = candidate_of(lane)
        for queue in self._queues.values():
            group = queue.head(now)
            if queue.lane is lane or group is None or not self._may_move(group, lane):
                continue
            num_tokens, there = _num_tokens(group), queue.seen or queue.look()
            there_s = expected_s(there, num_tokens - self._num_hits(group, queue.lane), now, goes_first=True)
            gain = there_s - expected_s(here, num_tokens - self._num_hits(group, lane), now, goes_first=True)
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


def _first_waiting(group: SequenceGroup) -> Sequence | None:
    """The sequence of a group that is looked up: the first that waits without KV; the others share its blocks."""
    return next((each for each in group.waiting_sequences if each.state is SequenceState.WAITING), None)


def _num_tokens(group: SequenceGroup) -> int:
    """Number of tokens whose KV its waiting sequences need: of each one that has output, else of the prompt."""
    return sum(sequence.num_tokens for sequence in group.waiting_sequences if sequence.state is SequenceState.WAITING)


def _with_first_block(sequence: Sequence, queues: list[LaneQueue]) -> list[int]:
    """The lanes whose prefix caches have the first block of a waiting sequence: no other one has any of it."""
    blocks: dict[int, Key | None] = {}
    found = []
    for queue in queues:
        size = queue.block_size
        if size not in blocks:
            blocks[size] = first_block(sequence, size)
        if (block := blocks[size]) is not None and block in queue.cached:
            found.append(queue.lane.executor_id)
    return found
