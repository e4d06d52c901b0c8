"""Counts of requests, for ModelStatistics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cadenza.outputs import RequestMetrics
from gateway_svc.dialects import inference_pb2 as pb
from gateway_svc.kserve.model import VERSION


@dataclass(slots=True)
class _Duration:
    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.ns += int(seconds * 1e9)

    def message(self) -> pb.StatisticDuration:
        return pb.StatisticDuration(count=self.count, ns=self.ns)


@dataclass(slots=True)
class Statistics:
    """Since the gateway's start, over all names of the model."""

    _success: _Duration = field(default_factory=_Duration)
    _queue: _Duration = field(default_factory=_Duration)
    _fail: _Duration = field(default_factory=_Duration)
    _last_ms: int = 0

    def succeeded(self, metrics: RequestMetrics | None) -> None:
        """A request was answered."""
        self._success.add(metrics.total_s if metrics else 0.0)
        self._queue.add(metrics.queue_s if metrics else 0.0)
        self._last_ms = time.time_ns() // 1_000_000

    def failed(self) -> None:
        """A request ended with an error."""
        self._fail.add(0.0)

    def message(self, name: str) -> pb.ModelStatisticsResponse:
        """What there is so far."""
        times = pb.InferStatistics(
            success=self._success.message(), fail=self._fail.message(), queue=self._queue.message()
        )
        model = pb.ModelStatistics(
            name=name,
            version=VERSION,
            last_inference=self._last_ms,
            inference_count=self._success.count,
            execution_count=self._success.count,
            inference_stats=times,
        )
        return pb.ModelStatisticsResponse(model_stats=[model])
