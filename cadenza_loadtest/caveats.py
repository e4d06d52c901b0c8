"""Warnings that are known before a load test begins."""

from __future__ import annotations

from collections.abc import Iterator

from cadenza_loadtest.driving.target import ServerFacts
from cadenza_loadtest.settings import LoadSettings
from cadenza_loadtest.workloads.readers import read_records
from cadenza_loadtest.workloads.spec import find_file


def load_caveats(settings: LoadSettings) -> Iterator[str]:
    """Warnings about the load itself. Raises LoadTestError for a file that cannot be read."""
    if settings.from_file and settings.arrivals != "trace":
        _, first = next(read_records(find_file(settings)))
        if first.timestamp is not None:
            yield "the timestamps in the workload's file have no effect without --arrivals trace"


def server_caveats(settings: LoadSettings, server: ServerFacts) -> Iterator[str]:
    """Warnings about this load on this server."""
    size = full_batch(server)
    if size > 1 and settings.timeout_s is None:
        yield (
            f"the server's batches are static: requests that do not fill one of {size} wait for more, at the end "
            "forever; give the server --max-wait-s or the load --timeout-s"
        )


def full_batch(server: ServerFacts) -> int:
    """Number of requests that must wait before the server starts any; 1 except with static batches."""
    options = server.options
    if options.get("batching") != "static" or options.get("max_wait_s"):
        return 1
    return int(options.get("batch_size", 1))
