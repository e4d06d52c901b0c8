"""Histograms, the lag of an event loop, and the server of metrics: who may read them, and what a bad reader costs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza_common.metrics import server as server_module
from cadenza_common.metrics.common import LoopLag
from cadenza_common.metrics.families import Definition, Scrape
from cadenza_common.metrics.histogram import Histogram, sum_of
from cadenza_common.metrics.server import LoopCollector, MetricsServer

DEFINITIONS = (
    Definition("test:requests_total", "counter", "requests", "Requests.", ("kind",)),
    Definition("test_seconds", "histogram", "seconds", "Times."),
)


def test_a_histogram_counts_up_to_each_bound_and_in_coarser_buckets() -> None:
    histogram = Histogram((0.1, 0.5, 1.0))
    for value, count in ((0.1, 1), (0.2, 3), (0.5, 1), (0.7, 1), (5.0, 2)):
        histogram.observe(value, count)
    assert histogram.cumulative(histogram.bounds) == [1, 5, 6, 8]
    assert histogram.cumulative((0.5,)) == [5, 8]
    assert histogram.total == pytest.approx(0.1 + 0.6 + 0.5 + 0.7 + 10)
    copy = histogram.copy()
    histogram.observe(0.1)
    assert (copy.num_values, histogram.num_values) == (8, 9)
    assert sum_of([copy, histogram], histogram.bounds).num_values == 17


async def test_a_held_loop_is_seen() -> None:
    lag = LoopLag()
    lag.start()
    await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251  # holds the loop, which is what is measured
    # The timer has come due meanwhile: it runs in the loop's next turns.
    await asyncio.sleep(0.01)
    lag.stop()
    assert 0.2 < lag.max_s < 5
    assert lag.histogram.cumulative((0.1,))[0] < lag.histogram.num_values


class Running:
    """A server whose numbers are read on a loop in another thread."""

    def __init__(self, token_file: str | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.server = MetricsServer("127.0.0.1", 0, token_file=token_file)
        self.server.start(LoopCollector(self.loop, lambda: self._scrape().families))

    def _scrape(self) -> Scrape:
        assert threading.current_thread() is self._thread, "numbers are read where they are changed"
        scrape, histogram = Scrape(DEFINITIONS), Histogram((0.5,))
        histogram.observe(0.25, 3)
        scrape.add("test:requests_total", 7, 'a "kind"')
        scrape.add_histogram("test_seconds", histogram)
        return scrape

    def get(self, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str]:
        request = urllib.request.Request(f"http://{self.server.address}{path}", headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read().decode()

    def stop(self) -> None:
        self.server.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def running() -> Iterator[Running]:
    server = Running()
    yield server
    server.stop()


def test_the_text_has_names_with_colons_whatever_a_scraper_accepts(running: Running) -> None:
    status, text = running.get(Accept="application/openmetrics-text;version=1.0.0;q=0.9,*/*;q=0.1")
    assert status == 200
    lines = text.splitlines()
    assert 'test:requests_total{kind="a \\"kind\\""} 7.0' in lines
    assert 'test_seconds_bucket{le="0.5"} 3.0' in lines
    assert 'test_seconds_bucket{le="+Inf"} 3.0' in lines
    assert "test_seconds_sum 0.75" in lines
    assert "# TYPE test:requests_total counter" in lines
    assert any(line.startswith("process_cpu_seconds_total ") for line in lines)


def test_nothing_but_the_metrics_is_served(running: Running) -> None:
    assert running.get("/")[0] == 404
    assert running.get("/metrics", "POST")[0] == 405
    assert running.get("/metrics", "HEAD") == (200, "")


def test_a_token_is_needed_and_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    running = Running(str(file))
    try:
        assert running.get()[0] == running.get(Authorization="Bearer wrong")[0] == 401
        assert running.get(Authorization="Basic first")[0] == running.get("/", Authorization="Bearer é")[0] == 401
        assert running.get(Authorization="Bearer first")[0] == 200
        file.write_text("second")
        assert running.get(Authorization="Bearer first")[0] == 401
        assert running.get(Authorization="Bearer second")[0] == 200
        file.write_text("")
        assert running.get(Authorization="Bearer ")[0] == 401, "an empty file lets nobody in"
        file.unlink()
        assert running.get(Authorization="Bearer second")[0] == 401
    finally:
        running.stop()


def test_a_held_loop_is_an_error_of_the_scrape(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_LOOP_TIMEOUT_S", 0.05)
    free = threading.Event()
    running.loop.call_soon_threadsafe(free.wait)
    try:
        assert running.get()[0] == 503
    finally:
        free.set()
    monkeypatch.undo()
    assert running.get()[0] == 200


def test_connections_are_limited_and_silent_ones_end(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module._Handler, "timeout", 0.5)
    host, _, port = running.server.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(server_module._MAX_CONNECTIONS + 1)]
    for each in silent:
        each.settimeout(10)
        assert each.recv(1) == b"", "closed: the last one at once, the others after their time"
        each.close()
    assert running.get()[0] == 200


def test_connections_that_send_now_and_then_end_too(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a few of them would keep the scraper out for ever."""
    monkeypatch.setattr(server_module, "_WHOLE_S", 1.0)
    host, _, port = running.server.address.rpartition(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(server_module._MAX_CONNECTIONS)]
    end = time.monotonic() + 20
    for each in slow:
        each.settimeout(0.1)
        with contextlib.suppress(ConnectionError):
            while True:
                assert time.monotonic() < end
                each.send(b"G")
                with contextlib.suppress(TimeoutError):
                    if each.recv(1) == b"":
                        break
        each.close()
    assert running.get()[0] == 200


def test_a_port_that_is_taken_is_named(running: Running) -> None:
    port = int(running.server.address.rpartition(":")[2])
    with pytest.raises(OSError, match=f"metrics: cannot listen on 127.0.0.1:{port}: "):
        MetricsServer("127.0.0.1", port)
