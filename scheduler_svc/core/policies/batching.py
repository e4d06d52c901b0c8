"""Batching policies: when a waiting group may join the batch, and how much memory it reserves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.queues.queues import WaitingQueue
from scheduler_svc.core.sequences.sequence import Sequence

MAX_WAITING_STEPS = 20
"""For so many steps in a row new groups are held back at most; TGI's max_waiting_tokens."""


class BatchingPolicy(Protocol):
    """Decides per step how many groups may join, and per sequence how many tokens it reserves blocks for.

    It keeps nothing itself: what it remembers of a lane is in `lane.batching`.
    """

    is_placed: ClassVar[bool]
    """Whether waiting groups are placed on lanes; otherwise the first lane that starts a batch takes them in order."""

    def num_admissible(self, lane: Lane, waiting: WaitingQueue, now: float, *, draining: bool) -> int:
        """Maximum number of groups to admit in this step, if memory and slots allow."""

    def record_admissions(self, lane: Lane, count: int, *, memory_is_full: bool) -> None:
        """Record that `count` groups joined in this step; `memory_is_full`: the next one did not fit in memory."""

    def num_reserved_tokens(self, sequence: Sequence) -> int:
        """Number of tokens that a newly admitted sequence gets KV blocks for."""

    def wakes_at(self, lane: Lane, waiting: WaitingQueue, now: float) -> float | None:
        """When `num_admissible` changes by the passing of time; None: only by events."""


@dataclass(frozen=True, slots=True)
class ContinuousBatching:
    """Iteration-level batching (Orca, OSDI 2022): waiting groups may join at every step.

    With a `waiting_served_ratio`, as in TGI, prefills are held back until the ratio of waiting to running groups
    reaches it, or until MAX_WAITING_STEPS steps have passed without an admission.
    """

    waiting_served_ratio: float = 0.0
    is_placed: ClassVar[bool] = True

    def num_admissible(self, lane: Lane, waiting: WaitingQueue, now: float, *, draining: bool) -> int:
        """All waiting groups or none."""
        oldest = waiting.oldest
        if oldest is None or not self.waiting_served_ratio:
            return len(waiting)
        num_running = len({sequence.group for sequence in lane.running})
        enough = len(waiting) >= self.waiting_served_ratio * num_running
        state = lane.batching
        if enough or waiting.is_overdue(oldest, now) or draining or state.num_held_back >= MAX_WAITING_STEPS:
            state.num_held_back = 0
            return len(waiting)
        state.num_held_back += 1
        return 0

    def record_admissions(self, lane: Lane, count: int, *, memory_is_full: bool) -> None:
        """Not recorded."""

    def num_reserved_tokens(self, sequence: Sequence) -> int:
        """The tokens that it has; blocks are appended as it grows."""
        return sequence.num_tokens

    def wakes_at(self, lane: Lane, waiting: WaitingQueue, now: float) -> float | None:
        """None: steps of running sequences trigger planning."""
        return None


@dataclass(frozen=True, slots=True)
class StaticBatching:
    """A batch of `batch_size` requests runs until its longest sequence ends; memory is reserved to the full length.

    It starts when it is full, when the service drains, when a request is overdue, or, with a `window_s` (dynamic
    batching), that long after its first request arrived. Groups that were part of an earlier batch and were
    preempted, or did not fit in memory, start without waiting for a full batch.
    """

    batch_size: int
    window_s: float | None = None
    is_placed: ClassVar[bool] = False

    def num_admissible(self, lane: Lane, waiting: WaitingQueue, now: float, *, draining: bool) -> int:
        """The rest of the running batch; a whole batch when none runs and one may start."""
        state = lane.batching
        if not self._is_busy(lane):
            due = self._due(waiting)
            left = bool(state.closed_by_memory or state.num_unfilled)
            was_in_batch = len(waiting) > 0 and (left or any(group.was_admitted for group in waiting))
            starts = len(waiting) >= self.batch_size or draining or was_in_batch or (due is not None and now >= due)
            state.num_unfilled = min(self.batch_size, len(waiting)) if starts else 0
            state.closed_by_memory = False
        return state.num_unfilled

    def record_admissions(self, lane: Lane, count: int, *, memory_is_full: bool) -> None:
        """Count the joined groups; full memory closes the batch."""
        state = lane.batching
        state.num_unfilled -= count
        if memory_is_full and state.num_unfilled:
            state.num_unfilled, state.closed_by_memory = 0, True

    def num_reserved_tokens(self, sequence: Sequence) -> int:
        """Its maximum length without the last token, whose KV is never needed."""
        return sequence.max_len - 1

    def _is_busy(self, lane: Lane) -> bool:
        return bool(len(lane.running) or lane.finishing)

    def wakes_at(self, lane: Lane, waiting: WaitingQueue, now: float) -> float | None:
        """While no batch runs: the end of the window, or when a request becomes overdue.

        None once that has passed: a batch that could not start then, for lack of slots, waits for a result.
        """
        due = None if self._is_busy(lane) else self._due(waiting)
        return due if due is not None and due > now else None

    def _due(self, waiting: WaitingQueue) -> float | None:
        """When a batch starts that is not full; None: never."""
        if waiting.oldest is None:
            return None
        window_end = None if self.window_s is None else waiting.oldest.arrival + self.window_s
        return min((moment for moment in (window_end, waiting.overdue_at) if moment is not None), default=None)
