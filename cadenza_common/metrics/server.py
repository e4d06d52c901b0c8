"""The HTTP server of a service's metrics: threads of its own, beside the event loop."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from cadenza_common.wire.transport import format_address

if TYPE_CHECKING:
    import asyncio
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_MAX_CONNECTIONS = 8
"""Further ones are closed at once: a scraper needs one."""
_SILENCE_S = 5.0
"""A connection that sends nothing for so long, or takes nothing, is closed."""
_WHOLE_S = 15.0
"""A connection is closed after so long in any case: one that sends a byte now and then is never silent."""
_PLAIN = {"HTTP_ACCEPT": "text/plain"}
"""The text format for all: prometheus_client 0.26 writes OpenMetrics with `vllm_` in place of `vllm:`."""
_LOOP_TIMEOUT_S = 2.0
"""How long a scrape waits for an event loop that is held."""


class LoopCollector(Collector):
    """Reads a service's numbers on its event loop, and makes families of them in the thread of the scrape."""

    def __init__(self, loop: asyncio.AbstractEventLoop, read: Callable[[], Callable[[], Iterable[Metric]]]) -> None:
        """read: called on the loop; copies the numbers and returns the function that makes families of the copy."""
        self._loop = loop
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """All families; raises TimeoutError if the loop does not run."""
        copied: Future[Callable[[], Iterable[Metric]]] = Future()
        self._loop.call_soon_threadsafe(_call, self._read, copied)
        yield from copied.result(_LOOP_TIMEOUT_S)()


def _call(function: Callable[[], Any], result: Future[Any]) -> None:
    if result.set_running_or_notify_cancel():
        try:
            result.set_result(function())
        except Exception as exc:
            result.set_exception(exc)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def text_of(families: Iterable[Metric]) -> str:
    """Families in Prometheus' text format."""
    return generate_latest(_Families(families)).decode()


class MetricsServer:
    """Serves GET /metrics from `start` to `stop`."""

    def __init__(self, host: str, port: int, *, token_file: str | None = None) -> None:
        """Bind; port 0 takes any free one. token_file: holds the bearer token that a scraper must send.

        Raises OSError with a message for the user.
        """
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        app = make_wsgi_app(self._registry)
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            kind = type("_BoundServer", (_Server,), {"address_family": family})
            self._server: WSGIServer = kind(address[:2], _Handler)
        except OSError as exc:
            raise OSError(f"metrics: cannot listen on {format_address(host, port)}: {exc.strerror}") from exc
        self._server.set_app(_guarded(cast("WSGIApplication", app), token_file))
        self.address = format_address(host, self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    def start(self, collector: Collector) -> None:
        """Serve what the collector gives."""
        self._registry.register(collector)
        self._thread.start()

    def stop(self) -> None:
        """Close the port; a scrape that runs is cut off when the process ends."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_S

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not logged."""

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # the scraper is gone or silent
            self.close_connection = True


class _Server(ThreadingWSGIServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer's own looks the host's name up, which may take seconds.
        socket_address = self.server_address
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(socket_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        end = threading.Timer(_WHOLE_S, _shut_down, [request])
        end.daemon = True
        try:
            end.start()
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is no event."""


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        connection.shutdown(socket.SHUT_RDWR)


def _guarded(app: WSGIApplication, token_file: str | None) -> WSGIApplication:
    """The application at /metrics alone, for those with the token."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if token_file is not None and not _has_token(environ.get("HTTP_AUTHORIZATION", ""), token_file):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Length", "0")])
            return []
        if environ.get("PATH_INFO") != "/metrics":
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"the metrics are at /metrics\n"]
        method = environ["REQUEST_METHOD"]
        is_head = method == "HEAD"
        try:
            body = list(app({**environ, "REQUEST_METHOD": "GET" if is_head else method, **_PLAIN}, start_response))
        except TimeoutError:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"the event loop does not answer\n"]
        return [] if is_head else body

    return answer


def _has_token(authorization: str, token_file: str) -> bool:
    """Whether the header names the token in the file, which is read again for each scrape."""
    try:
        token = Path(token_file).read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError):
        return False
    kind, _, given = authorization.partition(" ")
    return bool(token) and kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())
