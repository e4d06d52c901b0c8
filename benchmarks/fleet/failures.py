"""When executors fail: independent of each other, at a rate for each GPU, and back after a fixed time.

Meta counted 419 unexpected interruptions in 54 days of pre-training Llama 3 405B on 16,384 H100 GPUs (The Llama 3 Herd
of Models, arXiv 2407.21783, section 3.3.4 and table 5): 1.97e-5 for each GPU and hour. There any of them stops the
whole job, here it stops the executor that has the GPU. The time until an executor serves again is not published there.
"""

from __future__ import annotations

import heapq
import math

from cadenza_loadtest.seeds import stream

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
