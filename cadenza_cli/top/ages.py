"""How long sequences have been in their queue, from step records."""

from __future__ import annotations

from cadenza.info import ServerLoad
from cadenza.v1 import admin_pb2

_NUM_REMEMBERED = 4096


class Ages:
    """Since when sequences have been in their queue, in seconds of the server's clock.

    Sequences from before the first record count from that record on. Records do not name waiting requests: for these
    only the time since the queue was last empty is known.
    """

    def __init__(self) -> None:
        self._waiting_since_s: float | None = None
        self._running: dict[int, float] = {}  # by sequence id: since when
        self._swapped: dict[int, float] = {}
        self._left: dict[int, None] = {}  # the last ones, because later plans in flight may still name them

    def add(self, record: admin_pb2.StepRecord) -> None:
        """Add a record; records come in the order of steps."""
        at_s = record.planned_ns / 1e9
        self._look_at_waiting(record.load.num_waiting, at_s)
        for sequence_id in record.preempted_ids:
            self._running.pop(sequence_id, None)
        for sequence_id in record.swapped_out_ids:
            self._swapped[sequence_id] = at_s
        for join in record.joined:
            self._running[join.sequence_id] = at_s
            self._swapped.pop(join.sequence_id, None)
        for sequence_id in record.sequence_ids:
            if sequence_id not in self._running and sequence_id not in self._left:
                self._running[sequence_id] = at_s
        for leave in record.left:
            self._forget(leave.sequence_id)

    def look(self, load: ServerLoad, now_s: float) -> tuple[float | None, float | None, float | None]:
        """How long the waiting queue has been non-empty, and the longest times of a running and of a swapped
        sequence."""
        self._look_at_waiting(load.num_waiting, now_s)
        if not load.num_running:  # an aborted sequence appears only in the next record
            self._running.clear()
        if not load.num_swapped:
            self._swapped.clear()
        since_s = (
            self._waiting_since_s,
            min(self._running.values(), default=None),
            min(self._swapped.values(), default=None),
        )
        waiting_s, running_s, swapped_s = (None if each is None else max(0.0, now_s - each) for each in since_s)
        return waiting_s, running_s, swapped_s

    def _look_at_waiting(self, num_waiting: int, now_s: float) -> None:
        if not num_waiting:
            self._waiting_since_s = None
        elif self._waiting_since_s is None:
            self._waiting_since_s = now_s

    def _forget(self, sequence_id: int) -> None:
        self._running.pop(sequence_id, None)
        self._swapped.pop(sequence_id, None)
        self._left[sequence_id] = None
        if len(self._left) > _NUM_REMEMBERED:
            del self._left[next(iter(self._left))]
