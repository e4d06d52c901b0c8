"""Creates the core's policies from the service's options."""

from __future__ import annotations

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.policies.batching import BatchingPolicy, ContinuousBatching, StaticBatching
from scheduler_svc.core.policies.placement import ExpectedTime, RoundRobin
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.orders import FairOrder, FcfsOrder, OrderPolicy, PriorityOrder, ShortestFirstOrder


def policies_from_options(config: SchedulerConfig) -> Policies:
    """The policies that the options select."""
    return Policies(
        order=_order(config),
        batching=_batching(config),
        max_wait_s=config.max_wait_s,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        prefix_caching=config.enable_prefix_caching,
        preemption=config.preemption,
        placement=RoundRobin() if config.placement == "round-robin" else ExpectedTime(),
    )


def _order(config: SchedulerConfig) -> OrderPolicy:
    match config.order:
        case "fcfs":
            return FcfsOrder()
        case "priority":
            return PriorityOrder()
        case "fair":
            return FairOrder()
        case "sjf":
            return ShortestFirstOrder()


def _batching(config: SchedulerConfig) -> BatchingPolicy:
    match config.batching:
        case "continuous":
            return ContinuousBatching(config.waiting_served_ratio)
        case "static":
            return StaticBatching(config.batch_size)
        case "dynamic":
            return StaticBatching(config.batch_size, config.batch_window_ms / 1000)
