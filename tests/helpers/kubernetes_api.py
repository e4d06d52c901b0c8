"""An API server that has EndpointSlices alone: lists, watches, tokens and TLS as Kubernetes has them."""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cadenza_common.wire.tls.sockets import ResetSafeSocket
from scheduler_svc.executors.kubernetes import KubernetesApi
from tests.helpers.certificates import certificates

_PATH = re.compile(r"/apis/discovery\.k8s\.io/v1/namespaces/([^/]+)/endpointslices")
SLICE_SIZE = 2
"""Endpoints of one slice; Kubernetes has 100."""


@dataclass
class FakeKubernetes:
    """The slices of one service; what is published is seen by lists, and ends watches from older versions."""

    namespace: str
    service: str
    account: Path
    token: str = "first"
    items: list[dict[str, Any]] = field(default_factory=list)
    version: int = 1
    oldest: int = 0
    """Watches from before this version are refused, as the server has forgotten it."""
    refusal: tuple[int, str] | None = None
    raw: bytes | None = None
    """What lists answer instead, if it is set."""
    seen: list[dict[str, str]] = field(default_factory=list)
    """The queries of all requests."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    closed: bool = False
    port: int = 0

    @property
    def cluster(self) -> KubernetesApi:
        return KubernetesApi("localhost", self.port, self.account)

    def set_token(self, token: str) -> None:
        """The token that is asked for from now on, and that the pod finds in its folder."""
        self.token = token
        (self.account / "token").write_text(token + "\n")

    def publish(self, ready: dict[str, bool], *, port: int = 50052) -> None:
        """The addresses of the service, and whether each is ready, in slices."""
        entries = [
            {"addresses": [address], "conditions": {"ready": is_ready, "serving": is_ready, "terminating": False}}
            for address, is_ready in ready.items()
        ]
        parts = [entries[start : start + SLICE_SIZE] for start in range(0, len(entries), SLICE_SIZE)]
        self.publish_slices([endpoint_slice(part, port) for part in parts])

    def publish_slices(self, items: list[dict[str, Any]]) -> None:
        with self.changed:
            self.items = items
            self.version += 1
            self.changed.notify_all()

    def listing(self) -> bytes:
        if self.raw is not None:
            return self.raw
        metadata = {"resourceVersion": str(self.version)}
        return json.dumps(
            {
                "kind": "EndpointSliceList",
                "apiVersion": "discovery.k8s.io/v1",
                "metadata": metadata,
                "items": self.items,
            }
        ).encode()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


def endpoint_slice(endpoints: list[dict[str, Any]], port: int = 50052, family: str = "IPv4") -> dict[str, Any]:
    return {
        "addressType": family,
        "endpoints": endpoints,
        "ports": [{"name": "grpc", "port": port, "protocol": "TCP"}, {"name": "metrics", "port": 9464}],
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: FakeKubernetes

    def do_GET(self) -> None:
        api, parts = self.api, urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        api.seen.append(query)
        found = _PATH.fullmatch(parts.path)
        if self.headers["Authorization"] != f"Bearer {api.token}":
            self._status(401, "Unauthorized")
        elif api.refusal is not None:
            self._status(*api.refusal)
        elif not found or found[1] != api.namespace:
            self._status(404, "the server could not find the requested resource")
        elif query.get("labelSelector") != f"kubernetes.io/service-name={api.service}":
            self._answer(200, b'{"metadata": {"resourceVersion": "1"}, "items": []}')
        elif "watch" not in query:
            self._answer(200, api.listing())
        elif int(query["resourceVersion"]) < api.oldest:
            self._status(410, "too old resource version")
        else:
            self._watch(int(query["resourceVersion"]))

    def _watch(self, version: int) -> None:
        """Chunks, as the server sends them; ends with the connection."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with self.api.changed:
            self.api.changed.wait_for(lambda: self.api.version > version or self.api.closed)
        line = json.dumps({"type": "MODIFIED", "object": {"kind": "EndpointSlice"}}).encode() + b"\n"
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.close_connection = True

    def _status(self, code: int, message: str) -> None:
        self._answer(code, json.dumps({"kind": "Status", "code": code, "message": message}).encode())

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _TLSServer(ThreadingHTTPServer):
    """Its connections are TLS, not the socket that listens: for a client that is gone before it is accepted,
    `SSLSocket.accept` of Python 3.11 raises ConnectionResetError and leaves the socket open."""

    daemon_threads = True

    def __init__(self, listen: tuple[str, int], handler: type[_Handler], context: ssl.SSLContext) -> None:
        super().__init__(listen, handler)
        self._context = context

    def finish_request(self, request: Any, client_address: Any) -> None:
        with suppress(OSError):  # the client is gone, or trusts another CA
            request.getpeername()
            with self._context.wrap_socket(request, server_side=True) as secure:
                super().finish_request(secure, client_address)


@contextmanager
def kubernetes_api(
    folder: Path,
    namespace: str = "cadenza",
    service: str = "cadenza-executor",
    listen: tuple[str, int] = ("127.0.0.1", 0),
) -> Iterator[FakeKubernetes]:
    """A running one, by localhost and by its name in a cluster, and the folder of a service account beside it."""
    own = certificates(folder / "api", hosts=[KubernetesApi().host]).folder / "scheduler"
    account = folder / "account"
    account.mkdir()
    (account / "ca.crt").write_bytes((own / "ca.pem").read_bytes())
    api = FakeKubernetes(namespace, service, account)
    api.set_token("first")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslsocket_class = ResetSafeSocket
    context.load_cert_chain(own / "scheduler.pem", own / "scheduler-key.pem")
    handler = type("Handler", (_Handler,), {"api": api})
    with _TLSServer(listen, handler, context) as server:
        api.port = server.server_address[1]
        serving = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        serving.start()
        try:
            yield api
        finally:
            api.close()
            server.shutdown()
            serving.join()
