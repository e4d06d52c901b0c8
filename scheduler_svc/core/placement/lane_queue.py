"""The groups that wait for one lane, and what a group that is placed there would find."""

from __future__ import annotations

from collections.abc import Container, Iterator

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.memory.prefix_cache import Key
from scheduler_svc.core.policies.placement import Candidate
from scheduler_svc.core.queues.orders import OrderPolicy
from scheduler_svc.core.queues.passed import NOTHING_PASSED, PassedOver
from scheduler_svc.core.queues.queues import WaitingQueue
from scheduler_svc.core.sequences.sequence import SequenceGroup


class LaneQueue:
    """A lane's part of the waiting queue, in the same order."""

    def __init__(self, lane: Lane, order: OrderPolicy, max_wait_s: float | None) -> None:
        self.lane = lane
        self.block_size = lane.spec.block_size
        self.cached: Container[Key] = lane.blocks.cached
        """The blocks in its prefix cache."""
        self.candidate = Candidate(lane)
        self._groups = WaitingQueue(order, max_wait_s)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """All groups by arrival."""
        return iter(self._groups)

    def head(self, now: float, passed: PassedOver = NOTHING_PASSED) -> SequenceGroup | None:
        """The group to admit next, as of the waiting queue."""
        return self._groups.head(now, passed)

    def add(self, group: SequenceGroup, num_tokens: int) -> None:
        """Place a group here, with so many tokens to compute."""
        group.placed_on, group.num_placed_tokens = self.lane.executor_id, num_tokens
        self._groups.add(group, again=True)
        self.candidate.num_queued += len(group.sequences)
        self.candidate.num_queued_tokens += num_tokens

    def remove(self, group: SequenceGroup) -> None:
        """Withdraw a group, which stays in the queue of all."""
        self._groups.remove(group)
        group.queued, group.placed_on = True, None
        self.candidate.num_queued -= len(group.sequences)
        self.candidate.num_queued_tokens -= group.num_placed_tokens

    def on_lane_used(self) -> None:
        """Something has changed on the lane."""
        self.candidate.seen = None

    def on_lane_changed(self) -> None:
        """The lane may have begun anew."""
        self.candidate.seen, self.cached = None, self.lane.blocks.cached

    def check_integrity(self) -> None:
        """Check what is counted by change; raises InvariantError."""
        name, found = f"executor {self.lane.executor_id}", self.candidate
        if any(group.placed_on != self.lane.executor_id for group in self._groups):
            raise InvariantError(f"a group is in the queue of {name}, but not placed there")
        if found.num_queued_tokens != sum(group.num_placed_tokens for group in self._groups):
            raise InvariantError(f"the tokens that wait for {name} do not add up")
        if found.num_queued != sum(len(group.sequences) for group in self._groups):
            raise InvariantError(f"the sequences that wait for {name} do not add up")
        if self.cached is not self.lane.blocks.cached:
            raise InvariantError(f"placement knows a former prefix cache of {name}")
        if found.seen not in (None, Candidate(self.lane).look()):
            raise InvariantError(f"{name} has changed since it was looked at for placements")
