"""Measures work on the GPU: the time of a step's parts, with events in its queue, and the peak memory of any work."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch


class StepClock:
    """Marks in the queue of one step. A CPU (Triton's interpreter) works synchronously: a mark is a time stamp."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[torch.cuda.Event] = []
        self._stamps: list[int] = []
        self._began_ns = 0

    def mark(self) -> None:
        """Set a mark after all work so far."""
        self._began_ns = self._began_ns or time.monotonic_ns()
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._stamps.append(time.monotonic_ns())

    def is_running(self) -> bool:
        """Whether the device has not reached the last mark."""
        return self._on_gpu and not self._marks[-1].query()

    def elapsed_ns(self) -> int:
        """Return the nanoseconds from the first mark to the last; to now, from its enqueueing, if it is running."""
        if self.is_running():
            return time.monotonic_ns() - self._began_ns
        if self._on_gpu:
            return int(1e6 * self._marks[0].elapsed_time(self._marks[-1]))
        return self._stamps[-1] - self._stamps[0]

    def between(self) -> list[int]:
        """Wait for the last mark; return the nanoseconds from each mark to the next."""
        if self._on_gpu:
            self._marks[-1].synchronize()
            pairs = zip(self._marks[:-1], self._marks[1:], strict=True)
            return [int(1e6 * before.elapsed_time(after)) for before, after in pairs]
        return [after - before for before, after in zip(self._stamps[:-1], self._stamps[1:], strict=True)]


def peak_bytes_of(work: Callable[[], None], device: torch.device) -> int:
    """Do the work; return the peak of PyTorch's bytes during it, minus its bytes afterwards.

    Unreferenced objects of the work, garbage too, and PyTorch's cached free memory are released first.
    """
    _free_unused(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    most = torch.cuda.max_memory_reserved(device)
    _free_unused(device)
    return int(most - torch.cuda.memory_reserved(device))


def _free_unused(device: torch.device) -> None:
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
