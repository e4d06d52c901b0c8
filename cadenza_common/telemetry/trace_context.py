"""W3C trace context: https://www.w3.org/TR/trace-context/. Needs no OpenTelemetry."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A caller's span, of which a request is a part."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    sampled: bool
    """Whether the caller records its span."""
    tracestate: str = ""
    """Values of tracing systems, passed on as they are."""


def parse_traceparent(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """The context of a `traceparent` and its `tracestate`; None if it is malformed, as the specification has it."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not (int(trace_id, 16) and int(span_id, 16)):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), tracestate)


def current_traceparent() -> str:
    """The `traceparent` of this program's current OpenTelemetry span; empty if there is none.

    A program with a span has imported OpenTelemetry. Others do not, and so pay a look into a dict.
    """
    context = _current_span_context()
    if context is None:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & _SAMPLED:02x}"


def current_metadata() -> tuple[tuple[str, str], ...] | None:
    """The current span's context as call metadata, with its `tracestate`; None if there is no span."""
    traceparent = current_traceparent()
    if not traceparent:
        return None
    context = _current_span_context()
    tracestate = context.trace_state.to_header() if context is not None else ""
    return ((TRACEPARENT, traceparent), *(((TRACESTATE, tracestate),) if tracestate else ()))


def _current_span_context() -> Any:
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    return context if context.is_valid else None
