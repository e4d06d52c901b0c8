"""Device time in a trace of torch.profiler (Chrome's format): busy and idle."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LEFT_OUT = 0.2
"""Share of the time left out at the beginning, while the profiler starts."""


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Time of a device from the start of its first kernel or copy to the end of its last."""

    span_s: float
    busy_s: float
    num_kernels: int

    @property
    def idle_share(self) -> float:
        """Share of the span in which nothing ran."""
        return 1 - self.busy_s / self.span_s


def read_trace(content: bytes) -> list[dict[str, Any]]:
    """The events of a trace, gzip or not."""
    text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def device_time(events: Iterable[dict[str, Any]], left_out: float = _LEFT_OUT) -> DeviceTime | None:
    """Device time after the `left_out` share at the beginning; None if the trace has no work of a device."""
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
