"""Batching policies: when may a waiting group join, and how much memory is it given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.queues.queues import WaitingQueue
from scheduler_svc.core.sequences.sequence import Sequence


class BatchingPolicy(Protocol):
    """Decides once per step how many groups may join, and once per group what it reserves."""

    def num_admissible(self, lane: Lane, waiting: WaitingQueue, now: float, *, draining: bool) -> int:
        """Groups that may join in this step, memory and slots allowing."""

    def joined(self, count: int, *, memory_is_full: bool) -> None:
        """So many have joined in this step; was memory what kept the next one out."""

    def num_reserved_tokens(self, sequence: Sequence) -> int:
        """Tokens that a newcomer gets KV blocks for."""

    def wakes_at(self, lane: Lane, waiting: WaitingQueue, now: float) -> float | None:
        """When the answer changes by itself; None: only by events."""


@dataclass(slots=True)
class ContinuousBatching:
    """Iteration-level batching (Orca, OSDI 2022): whoever waits may join any step.

    With a `waiting_served_ratio` prefills are held back until enough wait, as in TGI: until those that wait are that
    share of those that run, or `max_waiting_steps` steps have passed in which nobody could join.
    """

    waiting_served_ratio: float = 0.0
    max_waiting_steps: int = 20
    _num_held_back: int = 0

    def num_admissible(self, lane: Lane, waiting: WaitingQueue, now: float, *, draining: bool) -> int:
        """All or none."""
        oldest = waiting.oldest
        if oldest is None or not self.waiting_served_ratio:
            return len(waiting)
        num_running = len({sequence.group for sequence in lane.running})
        enough = len(waiting) >= self.waiting_served_ratio * num_running
        if enough or waiting.is_overdue(oldest, now) or draining or self._num_held_back >= self.max_waiting_steps:
            self._num_held_back = 0
            return len(waiting)
        self._num_held_back += 1
        return 0

    def joined(self, count: int, *, memory_is_full: bool) -> None:
        """Nothing to note."""

    def num_reserved_tokens(self, sequence: Sequence) -> int:
        """Those that it has: more come as it grows."""
        return len(sequence.token_ids)

    def wakes_at(self, lane: Lane, waiting: WaitingQueue, now: float) -> float | None:
        """Those that run make steps."""
        return None


@dataclass(slots=True)
class StaticBatching:
    """A batch of `batch_size` requests runs until its longest sequence ends; memory is reserved to the full length.

    It starts when it is full, when the service drains, when a request is overdue, or, with a `window_s`, that long
    after its first request came (then it is called dynamic). Those that were part of a batch before, and lost their
    memory or found none, need not wait for company again.
    """

    batch_size: int
    window_s: float | None = None
    _num_unfilled: int = 0
    """Places of the running batch that are not taken yet: its prompts may need several steps."""
    _closed_by_memory: bool = False
    """Memory has kept requests out of the batch that ran last."""

    def num_admissible(self, lane: Lane, waiting: WaitingQueue, now: float, *, draining: bool) -> int:
        """What is left of the batch; a whole one when none runs and it may start."""
        if not self._is_busy(lane):
            due = self.wakes_at(lane, waiting, now)
            left = bool(self._closed_by_memory or self._num_unfilled)
            was_in_one = len(waiting) > 0 and (left or any(group.was_admitted for group in waiting))
            starts = len(waiting) >= self.batch_size or draining or was_in_one or (due is not None and now >= due)
            self._num_unfilled = min(self.batch_size, len(waiting)) if starts else 0
            self._closed_by_memory = False
        return self._num_unfilled

    def joined(self, count: int, *, memory_is_full: bool) -> None:
        """Count them; with memory full the batch is closed."""
        self._num_unfilled -= count
        if memory_is_full and self._num_unfilled:
            self._num_unfilled, self._closed_by_memory = 0, True

    def num_reserved_tokens(self, sequence: Sequence) -> int:
        """As many as it may ever have, without the last: its KV is never needed."""
        return sequence.max_len - 1

    def _is_busy(self, lane: Lane) -> bool:
        return bool(len(lane.running) or lane.finishing)

    def wakes_at(self, lane: Lane, waiting: WaitingQueue, now: float) -> float | None:
        """The end of the window, or when a request is overdue, while no batch runs."""
        if waiting.oldest is None or self._is_busy(lane):
            return None
        window_end = None if self.window_s is None else waiting.oldest.arrival + self.window_s
        return min((moment for moment in (window_end, waiting.overdue_at) if moment is not None), default=None)
