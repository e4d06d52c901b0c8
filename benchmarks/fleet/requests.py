"""The requests in a fleet, in columns; a row is used again when its request has ended.

When executors fail: independent of each other, at a rate for each GPU, and back after a fixed time.

Meta counted 419 unexpected interruptions in 54 days of pre-training Llama 3 405B on 16,384 H100 GPUs (The Llama 3 Herd
of Models, arXiv 2407.21783, section 3.3.4 and table 5): 1.97e-5 for each GPU and hour. There any of them stops the
whole job, here it stops the executor that has the GPU. The time until an executor serves again is not published there.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from cadenza_loadtest.requests import Ints
from cadenza_loadtest.seeds import stream

QUEUED, DECODING = 0, 1
_COLUMNS = {
    "due_s": np.float64,
    "ready_s": np.float64,
    "first_s": np.float64,
    "prompt": np.int64,
    "output": np.int64,
    "context": np.int64,
    "todo": np.int64,
    "left": np.int64,
    "cached": np.int64,
    "session": np.int64,
    "group": np.int64,
    "executor": np.int64,
    "end_step": np.int64,
    "next": np.int64,
    "state": np.int8,
    "live": np.bool_,
    "reserved": np.bool_,
    "again": np.bool_,
}


class RequestTable:
    """`due_s`: when the client sent it; `ready_s`: from when on a step may begin with it; `first_s`: end of the step of
    its first token, NaN before. `context`: tokens whose KV its prefill computes or finds; `todo`: those of them that
    are still to be computed; `left`: output tokens that are still to come when its prefill begins. `end_step`: the
    executor's step in which a decoding one ends, and `next`: another request that ends there, -1 for none.
    `reserved`: its KV is allocated; `again`: it was preempted, or its executor failed.
    """

    def __init__(self, capacity: int = 4096) -> None:
        for name, kind in _COLUMNS.items():
            setattr(self, name, np.zeros(0, kind))
        self._free = np.zeros(0, np.int64)
        self._num_free = 0
        self._grow(capacity)

    due_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    ready_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    first_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    prompt: Ints
    output: Ints
    context: Ints
    todo: Ints
    left: Ints
    cached: Ints
    session: Ints
    group: Ints
    executor: Ints
    end_step: Ints
    next: Ints
    state: np.ndarray[tuple[int], np.dtype[np.int8]]
    live: np.ndarray[tuple[int], np.dtype[np.bool_]]
    reserved: np.ndarray[tuple[int], np.dtype[np.bool_]]
    again: np.ndarray[tuple[int], np.dtype[np.bool_]]

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self.live) - self._num_free

    def add(self, due_s: np.ndarray[tuple[int], np.dtype[np.float64]], prompt: Ints, output: Ints) -> Ints:
        """Rows [n] of new requests, of which nothing is cached."""
        count = len(due_s)
        while self._num_free < count:
            self._grow(len(self.live))
        self._num_free -= count
        rows = self._free[self._num_free : self._num_free + count].copy()
        self.due_s[rows] = due_s
        self.ready_s[rows] = due_s
        self.first_s[rows] = np.nan
        self.prompt[rows] = self.context[rows] = self.todo[rows] = prompt
        self.output[rows] = self.left[rows] = output
        self.cached[rows] = 0
        self.session[rows] = self.group[rows] = self.executor[rows] = self.next[rows] = -1
        self.state[rows] = QUEUED
        self.live[rows] = True
        self.reserved[rows] = self.again[rows] = False
        return rows

    def release(self, rows: Ints) -> None:
        """These requests have ended."""
        self.live[rows] = False
        self._free[self._num_free : self._num_free + len(rows)] = rows
        self._num_free += len(rows)

    def on(self, executor: int) -> Ints:
        """Requests of an executor, those that are due first before others."""
        (rows,) = (self.live & (self.executor == executor)).nonzero()
        ordered: Ints = rows[np.argsort(self.due_s[rows], kind="stable")]
        return ordered

    def _grow(self, count: int) -> None:
        size = len(self.live)
        for name, kind in _COLUMNS.items():
            setattr(self, name, np.concatenate((getattr(self, name), np.zeros(count, kind))))
        added, unused = np.arange(size + count - 1, size - 1, -1), np.zeros(size - self._num_free, np.int64)
        self._free = np.concatenate((self._free[: self._num_free], added, unused))
        self._num_free += count


FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16384)


class Failures:
    """Failures and returns of executors, in the order of time."""

    def __init__(self, num_executors: int, per_executor_hour: float, repair_s: float, seed: int) -> None:
        self._rng = stream(seed, "failures")
        self._mean_s = 3600 / per_executor_hour if per_executor_hour else math.inf
        self._repair_s = repair_s
        self._due: list[tuple[float, int, bool]] = []
        """A heap: when, executor, whether it fails."""
        if per_executor_hour:
            times = self._rng.exponential(self._mean_s, num_executors).tolist()
            self._due = [(at_s, executor, True) for executor, at_s in enumerate(times)]
            heapq.heapify(self._due)

    def take(self, until_s: float) -> list[tuple[float, int, bool]]:
        """What happens before this time: when, to which executor, and whether it fails (or is back)."""
        happened = []
        while self._due and self._due[0][0] < until_s:
            at_s, executor, fails = heapq.heappop(self._due)
            happened.append((at_s, executor, fails))
            wait_s = self._repair_s if fails else float(self._rng.exponential(self._mean_s))
            heapq.heappush(self._due, (at_s + wait_s, executor, not fails))
        return happened
