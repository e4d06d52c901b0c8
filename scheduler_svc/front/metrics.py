"""The scheduler's metrics: what is read for a scrape, and the server, if there is one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from cadenza_common.metrics.common import LoopLag
from cadenza_common.metrics.histogram import Histogram
from cadenza_common.metrics.listener_counts import ListenerCounts
from cadenza_common.wire.tls.files import ExpiringFiles
from scheduler_svc.front.front import Front
from scheduler_svc.metrics.snapshot import ScrapeSnapshot, ServiceFigures, take_snapshot

if TYPE_CHECKING:
    from prometheus_client import Metric

    from cadenza_common.metrics.server import MetricsServer

_LOG = logging.getLogger(__name__)


class MeasuredPort(Protocol):
    """An executor's port that measures its plans."""

    target: str
    plan_bytes: Histogram


class SchedulerMetrics:
    """Serves the metrics at --metrics-port. Without it nothing is imported, and no thread runs."""

    def __init__(self, front: Front, ports: Sequence[MeasuredPort], listener: ListenerCounts) -> None:
        """ports: of all executors, those that were removed included; more are added while the service runs."""
        self._listener = listener
        self._links: Mapping[str, ExpiringFiles | None] = {}
        self._front = front
        self._ports = ports
        self._lag = LoopLag()
        self._server: MetricsServer | None = None

    def start(self, links: Mapping[str, ExpiringFiles | None]) -> None:
        """Listen; raises OSError if the port is taken. links: the TLS files of each; None: plain text."""
        self._links = links
        config = self._front.config
        if config.metrics_port is None:
            return
        # Imported here: it takes some 0.1 s, which only metrics need.
        from cadenza_common.metrics.server import LoopCollector, MetricsServer

        self._server = MetricsServer(config.metrics_host, config.metrics_port, token_file=config.metrics_token_file)
        self._lag.start()
        self._server.start(LoopCollector(asyncio.get_running_loop(), self._read))
        _LOG.info("metrics at http://%s/metrics", self._server.address)

    def stop(self) -> None:
        """Close the port; safe at any time."""
        self._lag.stop()
        if self._server is not None:
            self._server.stop()
            self._server = None

    def snapshot(self) -> ScrapeSnapshot:
        """A copy of all numbers at this moment."""
        front = self._front
        engine = front.engine
        service = ServiceFigures(
            model=getattr(engine.executors.served, "model", None),
            journal_writable=not engine.journal.problem,
            num_streams=front.num_streams,
            num_kept_bytes=engine.kept.num_bytes,
            prefix_caching=front.config.enable_prefix_caching,
            wall_time_s=engine.clock.wall_time_ns() / 1e9,
            listener=self._listener.copy(),
            loop_lag=self._lag.histogram.copy(),
            max_loop_lag_s=self._lag.max_s,
            plan_bytes=tuple((port.target, port.plan_bytes.copy()) for port in self._ports),
        )
        return take_snapshot(engine, service)

    async def text(self) -> str:
        """Prometheus' text format; made in a thread, as for a scrape."""
        return await asyncio.to_thread(_text, self.snapshot(), self._links)

    def _read(self) -> Callable[[], Iterable[Metric]]:
        return partial(_families, self.snapshot(), self._links)


def _families(snapshot: ScrapeSnapshot, links: Mapping[str, ExpiringFiles | None]) -> Iterable[Metric]:
    from cadenza_common.metrics.common import add_expiries
    from scheduler_svc.metrics.export import scrape

    result = scrape(snapshot)
    add_expiries(result, links)
    return result.families()


def _text(snapshot: ScrapeSnapshot, links: Mapping[str, ExpiringFiles | None]) -> str:
    from cadenza_common.metrics.server import text_of

    return text_of(_families(snapshot, links))
