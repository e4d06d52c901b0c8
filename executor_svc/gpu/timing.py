"""When a step's parts ran on the device, by events in its queue: what the host's clock can not see."""

from __future__ import annotations

import time

import torch


class StepClock:
    """Marks in the queue of one step. A CPU (Triton's interpreter) has done all before a mark when it is set."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[torch.cuda.Event] = []
        self._stamps: list[int] = []

    def mark(self) -> None:
        """Set a mark behind all work so far."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._stamps.append(time.monotonic_ns())

    def between(self) -> list[int]:
        """Nanoseconds from each mark to the next; waits for the last, behind which nothing of the step comes."""
        if self._on_gpu:
            self._marks[-1].synchronize()
            pairs = zip(self._marks[:-1], self._marks[1:], strict=True)
            return [int(1e6 * before.elapsed_time(after)) for before, after in pairs]
        return [after - before for before, after in zip(self._stamps[:-1], self._stamps[1:], strict=True)]
