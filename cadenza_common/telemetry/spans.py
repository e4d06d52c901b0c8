"""Spans as plain data, which `otlp` sends, and the ids of the spans of an executor's steps.

The spans of an executor's steps belong to no request: a step computes tokens of many. Each is the root of a trace of
its own, and the scheduler links a request's spans to those of its steps. Nothing is sent for that: both services derive
a step's ids from the executor's incarnation and the step's id, and know which steps have a span.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from cadenza_common.telemetry.trace_context import TraceContext

Value = str | bool | int | float | Sequence[str]
DECODE_STEPS_PER_SPAN = 16
"""Of the steps that only decode, every sixteenth has a span: steps may take under a millisecond."""
EXECUTOR = "cadenza.executor"
STEP_ID = "cadenza.step_id"


@dataclass(slots=True)
class Span:
    """A span with its children. Times are nanoseconds since 1970."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[tuple[str, int, Mapping[str, Value]]] = field(default_factory=list)
    """(name, time, attributes)."""
    links: list[tuple[tuple[int, int], Mapping[str, Value]]] = field(default_factory=list)
    """((trace id, span id), attributes)."""
    children: list[Span] = field(default_factory=list)
    error: str = ""
    """Why it failed; empty: it did not."""
    is_server: bool = False
    """Whether it serves a call of another process."""


class SpanSink(Protocol):
    """Sends spans; never blocks."""

    def emit(self, span: Span, parent: TraceContext | None = None, root_ids: tuple[int, int] | None = None) -> None:
        """Send a span and its children. Without a parent it is a root; root_ids: its trace id and span id."""


def step_ids(incarnation: int, step_id: int) -> tuple[int, int]:
    """The trace id and the span id of a step's span; incarnation: of the executor, 64 bits."""
    digest = blake2b(struct.pack("<QQ", incarnation, step_id), digest_size=24, person=b"cadenza step").digest()
    return int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:], "big")


def decode_step_has_span(step_id: int) -> bool:
    """Whether a step without prompt tokens has a span; a step with prompt tokens always has one."""
    return step_id % DECODE_STEPS_PER_SPAN == 0
