"""Figures of about a second each: tokens, latencies and queues, as the page charts them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

from cadenza.info import ServerInfo
from cadenza.steps.watch import PromptCounter
from cadenza.v1 import admin_pb2

MAX_POINTS = 180
COLUMNS = (
    "time_s", "output_tokens_per_s", "prompt_tokens_per_s", "ttft_p50_ms", "ttft_max_ms", "step_p50_ms", "step_p99_ms",
    "num_running", "num_waiting", "num_swapped",
)  # fmt: skip
"""Of a point; times are of the server's clock; None: nothing was measured."""


class Figures:
    """Collects records between two looks at the server's state; each look makes a point."""

    def __init__(self) -> None:
        self._points: deque[list[float | None]] = deque(maxlen=MAX_POINTS)
        self._last: ServerInfo | None = None
        self._prompts = PromptCounter()
        self._num_prompt_tokens = 0
        self._ttfts_ms: list[float] = []
        self._steps_ms: list[float] = []

    def add(self, record: admin_pb2.StepRecord) -> None:
        """Take a record."""
        self._num_prompt_tokens += self._prompts.count(record)[0]
        self._ttfts_ms += [time_ns / 1e6 for time_ns in record.first_token_ns]
        if record.timings.total_ns:
            self._steps_ms.append(record.timings.total_ns / 1e6)

    def look(self, info: ServerInfo) -> list[float | None] | None:
        """The point of the time since the last look; None for the first one."""
        last, self._last = self._last, info
        num_prompt_tokens, self._num_prompt_tokens = self._num_prompt_tokens, 0
        ttfts, self._ttfts_ms = self._ttfts_ms, []
        steps, self._steps_ms = self._steps_ms, []
        if last is None or info.uptime_s <= last.uptime_s:
            return None
        seconds = info.uptime_s - last.uptime_s
        num_output_tokens = info.load.num_output_tokens - last.load.num_output_tokens
        load = info.load
        values = (
            info.uptime_s,
            num_output_tokens / seconds,
            num_prompt_tokens / seconds,
            statistics.median(ttfts) if ttfts else None,
            max(ttfts, default=None),
            statistics.median(steps) if steps else None,
            _p99(steps),
            load.num_running,
            load.num_waiting,
            load.num_swapped,
        )
        point = [None if value is None else round(value, 3) for value in values]
        self._points.append(point)
        return point

    def snapshot(self) -> dict[str, Any]:
        """The names of the columns, and the points so far."""
        return {"columns": COLUMNS, "points": list(self._points)}


def _p99(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[98]
