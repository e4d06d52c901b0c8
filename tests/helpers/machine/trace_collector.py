"""An OpenTelemetry collector in this process: receives spans over OTLP/gRPC, as a real one does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.helpers.machine.loopback import new_address


@dataclass
class Received:
    """One span."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    links: list[tuple[str, str]]
    error: str
    tracestate: str


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Its spans so far, and the bytes of all messages."""

    endpoint: str = ""
    spans: list[Received] = field(default_factory=list)
    raw: bytes = b""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def Export(self, request: Any, context: Any) -> Any:
        with self._changed:
            self.raw += request.SerializeToString()
            for resource in request.resource_spans:
                service = _values(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_received(service, span) for span in scope.spans]
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the spans satisfy a condition, 20 s at most."""

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(condition, 20)

        assert await asyncio.to_thread(wait), [(span.service, span.name) for span in self.spans]

    def named(self, name: str, service: str = "cadenza-scheduler") -> list[Received]:
        return [span for span in self.spans if span.name == name and span.service == service]

    def children(self, parent: Received) -> list[Received]:
        return sorted((s for s in self.spans if s.parent_id == parent.span_id), key=lambda span: span.start_ns)


@contextlib.contextmanager
def collector(listen: str | None = None) -> Iterator[Collector]:
    """A collector that listens until the end; its address is no other test's, and stays free once it is gone."""
    listen = listen or f"{new_address()}:0"
    server, servicer = grpc.server(ThreadPoolExecutor(2)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(listen)
    servicer.endpoint = f"http://{listen.rpartition(':')[0]}:{port}"
    server.start()
    try:
        yield servicer
    finally:
        server.stop(0).wait()


def _received(service: str, span: Any) -> Received:
    return Received(
        service, span.name, span.kind, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
        span.start_time_unix_nano, span.end_time_unix_nano, _values(span.attributes),
        [(event.name, _values(event.attributes)) for event in span.events],
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        span.status.message, span.trace_state,
    )  # fmt: skip


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
