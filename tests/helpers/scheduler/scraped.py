"""What a scrape of an engine exports."""

from __future__ import annotations

from prometheus_client.samples import Sample

from cadenza_common.metrics.histogram import Histogram
from cadenza_common.metrics.listener_counts import ListenerCounts
from scheduler_svc.engine.engine import Engine
from scheduler_svc.metrics.export import scrape
from scheduler_svc.metrics.snapshot import ServiceFigures, take_snapshot


def samples(engine: Engine) -> dict[str, list[Sample]]:
    """By family."""
    service = ServiceFigures(
        model=engine.model, journal_writable=True, num_streams=0, num_kept_bytes=0, prefix_caching=False,
        wall_time_s=0.0, listener=ListenerCounts(), loop_lag=Histogram((1.0,)), max_loop_lag_s=0.0, plan_bytes=(),
    )  # fmt: skip
    families = scrape(take_snapshot(engine, service)).families()
    return {sample.name: list(family.samples) for family in families for sample in family.samples}
