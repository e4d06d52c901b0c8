"""Durations of GPU work: medians by CUDA events, with an L2 cache that holds none of the data."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

_FLUSH_BYTES = 256 << 20
"""Several times the largest L2."""
_CYCLES_PER_S = 2e9
_LEAST_REPEATS, _MOST_REPEATS = 5, 40
_MAX_AHEAD_S = 2e-3


class Clock(Protocol):
    """Measures launches."""

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of the work on the device: the median of several runs, after a first one that is discarded."""
        ...


class GpuClock:
    """CUDA events around the work alone: the device sleeps until the host has enqueued all of it."""

    def __init__(self, device: torch.device, budget_s: float = 0.25) -> None:
        """Repeat each work for about `budget_s` seconds."""
        self._budget_s = budget_s
        self._flushed = torch.ones(_FLUSH_BYTES // 4, dtype=torch.float32, device=device)
        self._sum = torch.empty((), dtype=torch.float32, device=device)

    def seconds(self, work: Callable[[], object]) -> float:
        work()
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        enqueued_s = time.perf_counter() - began
        torch.cuda.synchronize()
        first_s = self._times(work, 1, enqueued_s)[0]
        repeats = int(self._budget_s / max(first_s + enqueued_s, 1e-6))
        return statistics.median(self._times(work, max(_LEAST_REPEATS, min(_MOST_REPEATS, repeats)), enqueued_s))

    def _times(self, work: Callable[[], object], repeats: int, enqueued_s: float) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        ahead = int(min(_MAX_AHEAD_S, 2 * enqueued_s + 5e-5) * _CYCLES_PER_S)
        for start, end in events:
            # Read, not written: writing back dirty lines would take bandwidth from the measured work.
            torch.sum(self._flushed, 0, out=self._sum)
            torch.cuda._sleep(ahead)
            start.record()
            work()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]


class HostClock:
    """The host's clock, one run: for Triton's interpreter in place of a GPU, where times mean nothing."""

    def seconds(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
