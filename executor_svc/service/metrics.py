"""The executor's metrics: their definitions, what is read for a scrape, and the server, if there is one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from prometheus_client import Metric

from cadenza_common.metrics.common import (
    LISTENER_DEFINITIONS,
    LOOP_DEFINITIONS,
    LoopLag,
    add_expiries,
    add_listener,
    add_loop_lag,
)
from cadenza_common.metrics.families import Definition, Scrape
from cadenza_common.metrics.listener_counts import ListenerCounts
from cadenza_common.metrics.server import LoopCollector, MetricsServer
from cadenza_common.wire.tls.files import ExpiringFiles
from executor_svc.plan.description import Description
from executor_svc.service.lease import Leases
from executor_svc.service.servicer import resident_bytes
from executor_svc.worker.worker import Worker

_log = logging.getLogger(__name__)

DEFINITIONS = (
    Definition(
        "cadenza_executor_info", "gauge", "", "1; the labels name what runs.", ("model", "device", "dtype", "numerics")
    ),
    Definition(
        "cadenza_executor_answered_plans_total", "counter", "plans",
        "Plans by status: ok, failed, skipped after a failed one, out_of_memory, invalid_plan.", ("status",),
    ),
    Definition(
        "cadenza_executor_step_seconds", "histogram", "seconds",
        "Time of a step by phase; queue: its plan waits; moves: blocks are copied and swapped; forward; sample; total: "
        "all but the wait.", ("phase",),
    ),
    Definition("cadenza_executor_step_tokens", "histogram", "tokens", "Tokens that a step computed."),
    Definition("cadenza_executor_step_sequences", "histogram", "sequences", "Sequences in a step."),
    Definition("cadenza_executor_sampled_tokens_total", "counter", "tokens", "Tokens sampled."),
    Definition(
        "cadenza_executor_slot_errors_total", "counter", "slots", "Slots that failed alone, as for logits not finite."
    ),
    Definition("cadenza_executor_queued_plans", "gauge", "plans", "Plans that wait for the device."),
    Definition("cadenza_executor_step_age_seconds", "gauge", "seconds", "Age of the running step; 0: none runs."),
    Definition("cadenza_executor_sessions_total", "counter", "sessions", "Sessions that schedulers opened."),
    Definition("cadenza_executor_sessions_refused_total", "counter", "sessions", "Sessions that were refused."),
    Definition("cadenza_executor_session_open", "gauge", "0 or 1", "Whether a scheduler has a session."),
    Definition("cadenza_executor_device_lost", "gauge", "0 or 1", "Whether the device is lost; the process then ends."),
    Definition("cadenza_executor_kv_blocks", "gauge", "blocks", "KV blocks by tier.", ("tier",)),
    Definition("cadenza_executor_kv_bytes", "gauge", "bytes", "Memory of the KV blocks by tier.", ("tier",)),
    Definition("cadenza_executor_weight_bytes", "gauge", "bytes", "Memory of the weights."),
    Definition(
        "cadenza_executor_gpu_memory_bytes", "gauge", "bytes",
        "Memory of a GPU by part (weights, drafts and adapters, KV blocks, steps and graphs), computed before it was "
        "taken and measured after.", ("part", "kind"),
    ),
    Definition("cadenza_executor_resident_bytes", "gauge", "bytes", "Resident memory of the process."),
    *LISTENER_DEFINITIONS,
    *LOOP_DEFINITIONS,
)  # fmt: skip
"""docs/metrics.md is made from these: change them, then `make docs`."""


class ExecutorMetrics:
    """Serves the metrics."""

    def __init__(
        self, host: str, port: int, token_file: str | None, counts: ListenerCounts, files: ExpiringFiles | None
    ) -> None:
        """Bind the port; raises OSError if it is taken. counts, files: of the executor's listener."""
        self._counts = counts
        self._files = files
        self._server = MetricsServer(host, port, token_file=token_file)
        self._lag = LoopLag()

    def start(self, worker: Worker, description: Description, leases: Leases) -> None:
        """Serve, now that the model is loaded."""
        self._lag.start()
        loop = asyncio.get_running_loop()
        self._server.start(LoopCollector(loop, lambda: self._families_of(self._read(worker, description, leases))))
        _log.info("metrics at http://%s/metrics", self._server.address)

    def stop(self) -> None:
        """Close the port."""
        self._lag.stop()
        self._server.stop()

    def _families_of(self, scrape: Scrape) -> Callable[[], Iterable[Metric]]:
        def families() -> Iterable[Metric]:
            add_expiries(scrape, {"listener": self._files})
            return scrape.families()

        return families

    def _read(self, worker: Worker, description: Description, leases: Leases) -> Scrape:
        """All families. The device thread may add a step meanwhile: then one number has it, and another has not."""
        result = Scrape(DEFINITIONS)
        numbers, activity = worker.numbers, worker.activity()
        for status, count in numbers.statuses.items():
            result.add("cadenza_executor_answered_plans_total", count, status.name.lower())
        for phase, histogram in numbers.phases.items():
            result.add_histogram("cadenza_executor_step_seconds", histogram.copy(), phase)
        result.add_histogram("cadenza_executor_step_tokens", numbers.num_tokens.copy())
        result.add_histogram("cadenza_executor_step_sequences", numbers.num_sequences.copy())
        values = {
            "sampled_tokens_total": numbers.num_sampled,
            "slot_errors_total": numbers.num_slot_errors,
            "queued_plans": activity.num_queued,
            "step_age_seconds": activity.age_ns / 1e9,
            "sessions_total": leases.num_granted,
            "sessions_refused_total": leases.num_refused,
            "session_open": leases.current is not None,
            "device_lost": worker.lost.done(),
            "resident_bytes": resident_bytes(),
        }
        for name, value in values.items():
            result.add(f"cadenza_executor_{name}", float(value))
        _add_description(result, description)
        add_listener(result, self._counts)
        add_loop_lag(result, self._lag.histogram.copy(), self._lag.max_s)
        return result


def _add_description(result: Scrape, description: Description) -> None:
    geometry, limits = description.loaded.geometry, description.limits
    mode = description.fingerprint.mode
    result.add("cadenza_executor_info", 1, geometry.name, description.device, geometry.dtype, mode)
    for tier, count in (("device", limits.num_device_blocks), ("host", limits.num_host_blocks)):
        result.add("cadenza_executor_kv_blocks", count, tier)
        result.add("cadenza_executor_kv_bytes", count * description.bytes_per_block, tier)
    result.add("cadenza_executor_weight_bytes", geometry.weight_bytes)
    for part in description.memory:
        result.add("cadenza_executor_gpu_memory_bytes", part.computed, part.name, "computed")
        result.add("cadenza_executor_gpu_memory_bytes", part.measured, part.name, "measured")
