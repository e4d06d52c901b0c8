"""The rules that a scheduler goes by."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.core.batching import BatchingPolicy, ContinuousBatching
from scheduler_svc.core.policy import FcfsOrder, OrderPolicy


@dataclass(frozen=True, slots=True)
class Rules:
    """Who goes first, who may join when, and in what portions prompts are computed."""

    order: OrderPolicy = field(default_factory=FcfsOrder)
    batching: BatchingPolicy = field(default_factory=ContinuousBatching)
    max_wait_s: float | None = None
    """A group that arrived longer ago goes first in every order; None: no such limit."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a step, so that a long one leaves room for others; 0: the whole budget."""
