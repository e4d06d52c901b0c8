"""The rules that a scheduler goes by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from scheduler_svc.core.policies.batching import BatchingPolicy, ContinuousBatching
from scheduler_svc.core.queues.orders import FcfsOrder, OrderPolicy

Preemption = Literal["recompute", "swap", "auto"]


@dataclass(frozen=True, slots=True)
class Policies:
    """Who goes first, who may join when, and in what portions prompts are computed."""

    order: OrderPolicy = field(default_factory=FcfsOrder)
    batching: BatchingPolicy = field(default_factory=ContinuousBatching)
    max_wait_s: float | None = None
    """A group that arrived longer ago goes first in every order; None: no such limit."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a step, so that a long one leaves room for others; 0: the whole budget."""
    prefix_caching: bool = False
    """Keep KV blocks for requests that begin like those that computed them."""
    preemption: Preemption = "recompute"
    """What becomes of the KV of a group that has to give way; auto: whichever costs less."""
