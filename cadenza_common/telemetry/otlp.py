"""Sends spans to an OpenTelemetry collector over OTLP/gRPC, with the SDK's batches. Needs the extra `otel`."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cadenza_common.settings.extras import install_command
from cadenza_common.telemetry.spans import Span
from cadenza_common.telemetry.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan

_LOG = logging.getLogger(__name__)
_CLOSE_S = 2.0
"""How long the last spans may take at the end of the process."""
_LIBRARY_LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")


class TracesError(Exception):
    """Traces cannot be sent from here; the message says what to install."""


class Traces:
    """A SpanSink. Spans wait in a queue of 2,048 (OTEL_BSP_MAX_QUEUE_SIZE); if it is full, the oldest are lost.

    The SDK's other variables hold too, as OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME and OTEL_EXPORTER_OTLP_HEADERS.
    """

    def __init__(self, endpoint: str, service: str, *, version: str, instance: str) -> None:
        """endpoint: http://HOST:PORT or https://HOST:PORT. instance: names this process. Raises TracesError."""
        try:
            from opentelemetry import trace
            from opentelemetry.context import Context
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.status import StatusCode
        except ImportError as exc:
            raise TracesError(
                f"--otlp-traces-endpoint needs the extra otel ({exc}): {install_command('otel')}"
            ) from None
        # Their warnings come with every attempt; `_reporting` warns once.
        for name in _LIBRARY_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        about = {"service.version": version, "service.instance.id": instance}
        if "OTEL_SERVICE_NAME" not in os.environ:
            about["service.name"] = service
        self._trace, self._error_code = trace, StatusCode.ERROR
        self._ids, self._root = _ids(), Context()
        self._provider = TracerProvider(resource=Resource.create(about), id_generator=self._ids, shutdown_on_exit=False)
        exporter = _reporting(OTLPSpanExporter(endpoint=endpoint), endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("cadenza", version)

    def emit(self, span: Span, parent: TraceContext | None = None, root_ids: tuple[int, int] | None = None) -> None:
        """As in SpanSink."""
        self._emit(span, self._root if parent is None else self._remote(parent), root_ids)

    def flush(self) -> None:
        """Send what waits; blocks. For tests."""
        self._provider.force_flush()

    def close(self) -> None:
        """Send the last spans, for 2 s at most; blocks."""
        closing = threading.Thread(target=self._provider.shutdown, name="close traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _emit(self, span: Span, context: Context, root_ids: tuple[int, int] | None = None) -> None:
        trace = self._trace
        links = [
            trace.Link(trace.SpanContext(*ids, is_remote=True, trace_flags=trace.TraceFlags(1)), attributes)
            for ids, attributes in span.links
        ]
        self._ids.root = root_ids
        kind = trace.SpanKind.SERVER if span.is_server else trace.SpanKind.INTERNAL
        made = self._tracer.start_span(span.name, context, kind, span.attributes, links, span.start_ns)
        self._ids.root = None
        if not made.is_recording():
            return
        for name, time_ns, attributes in span.events:
            made.add_event(name, dict(attributes), time_ns)
        if span.error:
            made.set_status(self._error_code, span.error)
        if span.children:
            inner = trace.set_span_in_context(made, context)
            for child in span.children:
                self._emit(child, inner)
        made.end(span.end_ns)

    def _remote(self, parent: TraceContext) -> Context:
        trace = self._trace
        span_context = trace.SpanContext(
            int(parent.trace_id, 16),
            int(parent.span_id, 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(parent.sampled),
            trace_state=trace.TraceState.from_header([parent.tracestate] if parent.tracestate else []),
        )
        context: Context = trace.set_span_in_context(trace.NonRecordingSpan(span_context), self._root)
        return context


def _ids() -> Any:
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class _Ids(RandomIdGenerator):
        """Random ids; `root` are those of the next root span."""

        root: tuple[int, int] | None = None

        def generate_trace_id(self) -> int:
            return super().generate_trace_id() if self.root is None else self.root[0]

        def generate_span_id(self) -> int:
            if self.root is None or not self.root[1]:
                return super().generate_span_id()
            return self.root[1]

    return _Ids()


def _reporting(exporter: Any, endpoint: str) -> Any:
    """The exporter, which reports the first of several failures, and the end of them."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class _Reporting(SpanExporter):
        _num_lost = 0

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result: SpanExportResult = exporter.export(spans)
            if result is SpanExportResult.SUCCESS:
                if self._num_lost:
                    _LOG.info("spans are sent to %s again; at least %d were lost", endpoint, self._num_lost)
                self._num_lost = 0
            else:
                if not self._num_lost:
                    _LOG.warning("spans cannot be sent to %s: they are lost until they can; requests go on", endpoint)
                self._num_lost += len(spans)
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return _Reporting()
