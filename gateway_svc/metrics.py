"""The gateway's own numbers, and their text for Prometheus."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from cadenza_common.metrics.families import Definition, Scrape
from cadenza_common.metrics.histogram import Histogram

_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
DEFINITIONS = (
    Definition(
        "cadenza_gateway_requests_total", "counter", "requests",
        "Requests answered, by path, of gRPC the call, and status as HTTP has it; 499: the client left.",
        ("path", "status"),
    ),
    Definition(
        "cadenza_gateway_request_seconds", "histogram", "seconds",
        "From the head of a request to the end of its answer.",
    ),
    Definition("cadenza_gateway_running_requests", "gauge", "requests", "Requests that are being answered."),
    Definition("cadenza_gateway_running_prompts", "gauge", "prompts", "Prompts of these that run at the scheduler."),
    Definition("cadenza_gateway_deltas_total", "counter", "deltas", "Deltas of the scheduler that were streamed."),
    Definition("cadenza_gateway_writes_total", "counter", "writes", "Writes to sockets that carried them."),
    Definition(
        "cadenza_gateway_slow_readers_total", "counter", "clients", "Clients that were disconnected: they did not read."
    ),
    Definition("cadenza_gateway_scheduler_serving", "gauge", "1 or 0", "Whether the scheduler serves, by its health."),
)  # fmt: skip


@dataclass(slots=True)
class Counts:
    """Of requests and events, since start."""

    ended_requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By path and status."""
    num_running: int = 0
    num_deltas: int = 0
    num_writes: int = 0
    num_slow_readers: int = 0
    seconds: Histogram = field(default_factory=lambda: Histogram(_BOUNDS))

    def began(self) -> None:
        """A request has come."""
        self.num_running += 1

    def ended(self, path: str, status: int, seconds: float) -> None:
        """A request has been answered."""
        self.num_running -= 1
        self.ended_requests[path, status] += 1
        self.seconds.observe(seconds)

    def copy(self) -> Counts:
        """The same numbers, which do not change any more."""
        return replace(self, ended_requests=self.ended_requests.copy(), seconds=self.seconds.copy())


def metrics_text(counts: Counts, num_prompts: int, is_serving: bool) -> bytes:
    """Prometheus' text format; for a thread, as it pauses now and then."""
    # Imported here: it takes some 0.1 s, which only metrics need.
    from cadenza_common.metrics.server import text_of

    scrape = Scrape(DEFINITIONS)
    for (path, status), count in sorted(counts.ended_requests.items()):
        scrape.add("cadenza_gateway_requests_total", count, path, str(status))
    scrape.add_histogram("cadenza_gateway_request_seconds", counts.seconds)
    scrape.add("cadenza_gateway_running_requests", counts.num_running)
    scrape.add("cadenza_gateway_running_prompts", num_prompts)
    scrape.add("cadenza_gateway_deltas_total", counts.num_deltas)
    scrape.add("cadenza_gateway_writes_total", counts.num_writes)
    scrape.add("cadenza_gateway_slow_readers_total", counts.num_slow_readers)
    scrape.add("cadenza_gateway_scheduler_serving", int(is_serving))
    return text_of(scrape.families()).encode()
