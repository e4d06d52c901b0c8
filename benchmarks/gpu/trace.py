"""A trace in Chrome's format, as torch.profiler writes it: how long the device worked, and how long it waited."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LEFT_OUT = 0.2
"""Of the time, at the beginning: the profiler is getting under way."""


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """What a device did from its first piece of work to its last."""

    span_s: float
    busy_s: float
    num_kernels: int

    @property
    def idle_share(self) -> float:
        """Of the span, in which nothing ran."""
        return 1 - self.busy_s / self.span_s


def read_trace(content: bytes) -> list[dict[str, Any]]:
    """The events of a trace, gzip or not."""
    text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def device_time(events: Iterable[dict[str, Any]], left_out: float = _LEFT_OUT) -> DeviceTime | None:
    """How the device spent its time after the first share of it; None if the trace has no work of a device."""
    work = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in _ON_DEVICE
    )
    if not work:
        return None
    last = max(end for _, end in work)
    begin = work[0][0] + left_out * (last - work[0][0])
    work = [(start, end) for start, end in work if start >= begin]
    if not work or last <= work[0][0]:
        return None
    busy, reached = 0.0, work[0][0]
    for start, end in work:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return DeviceTime((last - work[0][0]) / 1e6, busy / 1e6, len(work))
