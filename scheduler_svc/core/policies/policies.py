"""The scheduler's policies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from scheduler_svc.core.policies.batching import BatchingPolicy, ContinuousBatching
from scheduler_svc.core.policies.placement import ExpectedTime, PlacementPolicy
from scheduler_svc.core.queues.orders import FcfsOrder, OrderPolicy

Preemption = Literal["recompute", "swap", "auto"]


@dataclass(frozen=True, slots=True)
class Policies:
    """Order, batching, chunking of prompts, prefix caching and preemption."""

    order: OrderPolicy = field(default_factory=FcfsOrder)
    batching: BatchingPolicy = field(default_factory=ContinuousBatching)
    max_wait_s: float | None = None
    """A group that arrived longer ago goes first in every order; None: no such limit."""
    long_prefill_token_threshold: int = 0
    """Maximum tokens of one prompt per step, so that a long prompt leaves budget for others; 0: the whole budget."""
    prefix_caching: bool = False
    """Whether to keep KV blocks for later requests with the same prefix."""
    preemption: Preemption = "recompute"
    """What happens to the KV of a preempted group; auto: the cheaper of swap and recompute."""
    placement: PlacementPolicy = field(default_factory=ExpectedTime)
    """Where a waiting group runs, if there are several executors."""
