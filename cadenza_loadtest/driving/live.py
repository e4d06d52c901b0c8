"""Requests in flight and what the target reports about them; an ended request goes into columns."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.requests import RequestShape

_NAN = float("nan")
CANCELLED = "CANCELLED"
"""The run ended before the request."""
TIMEOUT = "TIMEOUT"
"""The request took longer than the client's limit and was aborted."""
INCOMPLETE = "INCOMPLETE"
"""The stream ended before the answer was complete."""
SKIPPED = "SKIPPED"
"""A later turn of a session whose previous turn failed: it was never sent."""


@dataclass(slots=True)
class RequestInFlight:
    """A request in flight. Times are readings of the run's clock, in seconds; NaN: not yet."""

    shape: RequestShape
    due_s: float
    num_prompt_tokens: int
    """Length of the whole prompt: as sent, until the server reports it."""
    keep_gaps: bool = True
    keep_output: bool = False
    """Whether a later turn needs the answer: the target fills `output_ids`, or `output_text` if the prompt is a
    text."""
    sent_s: float = _NAN
    first_s: float = _NAN
    last_s: float = _NAN
    num_output_tokens: int = 0
    num_cached_tokens: int = -1
    num_preemptions: int = -1
    queue_s: float = _NAN
    server_first_s: float = _NAN
    server_total_s: float = _NAN
    error: str = ""
    message: str = ""
    """The error's message, from the server if it sent one."""
    output_ids: list[int] = field(default_factory=list)
    """Token ids of sample 0, if the target knows them."""
    output_text: list[str] = field(default_factory=list)
    """Text of sample 0, in pieces."""
    times: array[float] = field(default_factory=lambda: array("d"))
    """Arrival times of the messages with tokens, if gaps are kept."""

    def tokens(self, now_s: float, count: int, *, gap: bool = True) -> None:
        """A message arrived with `count` tokens, 1 or more, over all samples; without `gap` it does not count for the
        ITL."""
        if not self.num_output_tokens:
            self.first_s = now_s
        self.last_s = now_s
        self.num_output_tokens += count
        if self.keep_gaps and gap:
            self.times.append(now_s)

    def failed(self, code: str, message: str = "") -> None:
        """The request ended early; the first reported code and its message are kept."""
        if not self.error:
            self.error, self.message = code, message


_NUMBERS = (
    ("index", np.int64),
    ("due_s", np.float64),
    ("sent_s", np.float64),
    ("first_s", np.float64),
    ("last_s", np.float64),
    ("num_prompt_tokens", np.int64),
    ("num_cached_tokens", np.int64),
    ("num_output_tokens", np.int64),
    ("num_samples", np.int64),
    ("num_preemptions", np.int64),
    ("queue_s", np.float64),
    ("server_first_s", np.float64),
    ("server_total_s", np.float64),
    ("session", np.int64),
    ("turn", np.int64),
    ("num_gaps", np.int64),
)
_MOMENTS = ("due_s", "sent_s", "first_s", "last_s")


class Recorder:
    """Records requests that end, in any order, as numbers only: about 170 bytes each, and 4 for each gap."""

    def __init__(self) -> None:
        # The rows of numbers follow each other, so a request costs one call. float64 holds integers up to 2**53.
        self._rows = array("d")
        self._gaps = array("f")
        self._kinds: list[str] = []
        self._tenants: list[str] = []
        self._adapters: list[str] = []
        self._errors: list[str] = []

    def add(self, live: RequestInFlight) -> None:
        """Add a request that has ended or will never be sent."""
        gaps = np.diff(live.times).astype(np.float32)
        self._gaps.frombytes(gaps.tobytes())
        shape = live.shape
        self._rows.extend(
            (
                shape.index,
                live.due_s,
                live.sent_s,
                live.first_s,
                live.last_s,
                live.num_prompt_tokens,
                live.num_cached_tokens,
                live.num_output_tokens,
                shape.num_samples,
                live.num_preemptions,
                live.queue_s,
                live.server_first_s,
                live.server_total_s,
                shape.session,
                shape.turn,
                len(gaps),
            )
        )
        self._kinds.append(shape.kind)
        self._tenants.append(shape.tenant)
        self._adapters.append(shape.adapter)
        self._errors.append(live.error)

    def columns(self, start_s: float) -> RequestColumns:
        """All rows so far, by index; times in seconds since `start_s`, a reading of the run's clock."""
        rows = np.array(self._rows, np.float64).reshape(-1, len(_NUMBERS))
        order = np.argsort(rows[:, 0], kind="stable")
        named: dict[str, Any] = {}
        for place, (name, kind) in enumerate(_NUMBERS):
            column = rows[order, place]
            named[name] = column - start_s if name in _MOMENTS else column.astype(kind)
        ends = np.cumsum(rows[:, -1].astype(np.int64))
        gaps = np.split(np.array(self._gaps, np.float32), ends[:-1]) if len(ends) else []
        return RequestColumns(
            **named,
            kind=np.array(self._kinds, np.str_)[order],
            tenant=np.array(self._tenants, np.str_)[order],
            error=np.array(self._errors, np.str_)[order],
            adapter=np.array(self._adapters, np.str_)[order],
            gap_s=np.concatenate([gaps[place] for place in order]) if gaps else np.zeros(0, np.float32),
        )
