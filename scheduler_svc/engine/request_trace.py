"""What a trace of one request needs besides its times: the steps that computed its prompt, and what interrupted it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from cadenza_common.telemetry.trace_context import TraceContext

MAX_STEPS = 32
"""The spans of so many steps are kept; a long prompt in small chunks has more."""
_MAX_EVENTS = 64


@dataclass(frozen=True, slots=True)
class ExecutorIdentity:
    """An executor's process."""

    target: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step that computed tokens of the request outside the decode batch: of its prompt, or recomputed ones."""

    executor: ExecutorIdentity
    step_id: int
    planned_ns: int
    applied_ns: int
    device_ns: int
    num_tokens: int
    """Of this request."""


@dataclass(slots=True)
class Stay:
    """A time on one executor without an interruption."""

    executor: ExecutorIdentity
    first_step_id: int
    last_step_id: int = 0
    """0: not known."""


@dataclass(slots=True)
class Interruption:
    """A time in which the request did not run: it was preempted, or its executor was lost."""

    name: str
    start_ns: int
    end_ns: int = 0
    """0: it has not gone on."""


class RequestTrace:
    """Records of one request, on the engine's clock. A request that is not traced has none."""

    __slots__ = ("events", "interruptions", "num_steps", "parent", "stays", "steps", "trace_id")

    def __init__(self, parent: TraceContext | None) -> None:
        self.parent = parent
        """The caller's span; None: the request is the root of its trace."""
        self.trace_id = parent.trace_id if parent is not None else secrets.token_hex(16)
        self.steps: list[TracedStep] = []
        self.num_steps = 0
        """Number of traced steps; not all of them are kept."""
        self.stays: list[Stay] = []
        self.interruptions: list[Interruption] = []
        self.events: list[tuple[str, int, dict[str, str | int]]] = []
        """(name, time, attributes)."""

    def on_joined(self, executor: ExecutorIdentity, step_id: int, now_ns: int) -> None:
        """A sequence joined a step: the request begins there, goes on there, or is there already."""
        stay = self.stays[-1] if self.stays else None
        if self.interruptions and not self.interruptions[-1].end_ns:
            self.interruptions[-1].end_ns = now_ns
            if stay is not None and stay.executor == executor:
                self.add_event("resumed", now_ns, executor, step_id)
        elif stay is not None and stay.executor == executor:
            return
        if stay is not None and stay.executor != executor:
            self.add_event("moved", now_ns, executor, step_id, {"cadenza.from_executor": stay.executor.target})
        self.stays.append(Stay(executor, step_id))

    def on_interrupted(self, name: str, executor: ExecutorIdentity, step_id: int, now_ns: int) -> None:
        """The request does not run until it joins a step again."""
        if self.interruptions and not self.interruptions[-1].end_ns:
            return
        self.add_event(name, now_ns, executor, step_id)
        self.interruptions.append(Interruption(name, now_ns))
        if self.stays and not self.stays[-1].last_step_id:
            self.stays[-1].last_step_id = max(0, step_id - 1)

    def on_step(self, step: TracedStep) -> None:
        """A step computed a part of it."""
        self.num_steps += 1
        if len(self.steps) < MAX_STEPS:
            self.steps.append(step)

    def on_last_step(self, step_id: int) -> None:
        """A sequence ended with this step; the last call counts."""
        if self.stays:
            self.stays[-1].last_step_id = step_id

    def add_event(
        self, name: str, now_ns: int, executor: ExecutorIdentity, step_id: int, more: dict[str, str | int] | None = None
    ) -> None:
        """Record a moment; the first ones are kept."""
        if len(self.events) < _MAX_EVENTS:
            about: dict[str, str | int] = {"cadenza.executor": executor.target, "cadenza.step_id": step_id}
            self.events.append((name, now_ns, about | (more or {})))
