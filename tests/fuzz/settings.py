"""What one run of the fuzz goes by: rules, limits and habits, all drawn from its generator."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from scheduler_svc.core.policies.batching import BatchingPolicy, ContinuousBatching, StaticBatching
from scheduler_svc.core.policies.policies import Policies, Preemption
from scheduler_svc.core.queues.orders import FairOrder, FcfsOrder, OrderPolicy, PriorityOrder, ShortestFirstOrder
from scheduler_svc.core.types import ExecutorSpec

AXES = ("samples", "beams", "swap", "cache", "loss", "errors", "logprobs", "static", "states")
"""What can be left out, to find out what a failure needs."""
TENANTS = ("", "a", "b")
_ORDERS = {
    "fcfs": FcfsOrder,
    "priority": PriorityOrder,
    "sjf": ShortestFirstOrder,
    "fair": lambda: FairOrder({"a": 2.0}),
}


@dataclass(frozen=True)
class Settings:
    """One configuration. Chances are per step."""

    order: str
    batching: str
    batching_numbers: tuple[float, ...]
    max_wait_s: float | None
    long_prefill_token_threshold: int
    preemption: Preemption
    prefix_caching: bool
    spec: ExecutorSpec
    depth: int
    vocab_size: int
    num_stems: int
    """Beginnings that prompts share."""
    max_prompt: int
    max_live: int
    arrivals: float
    aborts: float
    losses: float
    errors: float
    """Of a slot that fails alone."""
    drains: float
    stop_strings: float
    """Of a sample that has got a token."""
    axes: tuple[str, ...]

    def rules(self) -> Policies:
        """The core's rules; orders and batchings have state, so they are made anew."""
        return Policies(
            order=self._order(),
            batching=self._batching(),
            max_wait_s=self.max_wait_s,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            prefix_caching=self.prefix_caching,
            preemption=self.preemption,
        )

    def _order(self) -> OrderPolicy:
        return _ORDERS[self.order]()

    def _batching(self) -> BatchingPolicy:
        first, second = self.batching_numbers
        match self.batching:
            case "static":
                return StaticBatching(int(first))
            case "dynamic":
                return StaticBatching(int(first), second)
            case _:
                return ContinuousBatching(first)


def draw_settings(rng: Random, axes: tuple[str, ...] = AXES) -> Settings:
    """A configuration in which things happen: small pools, small batches."""
    batching = rng.choice(["continuous", "continuous", "static", "dynamic"]) if "static" in axes else "continuous"
    numbers = (rng.choice([0.0, 0.0, 1.0]), 0.0) if batching == "continuous" else (rng.randint(1, 4), 4.0)
    return Settings(
        order=rng.choice(sorted(_ORDERS)),
        batching=batching,
        batching_numbers=numbers,
        max_wait_s=rng.choice([None, None, 5.0, 40.0]),
        long_prefill_token_threshold=rng.choice([0, 0, 3]),
        preemption=rng.choice(["recompute", "swap", "auto"]) if "swap" in axes else "recompute",
        prefix_caching="cache" in axes and rng.random() < 0.6,
        spec=draw_spec(rng, axes),
        depth=rng.randint(1, 4),
        vocab_size=rng.choice([23, 60, 97]),
        num_stems=rng.choice([1, 3, 8]),
        max_prompt=rng.choice([6, 16, 30]),
        max_live=rng.choice([3, 6, 12]),
        arrivals=rng.choice([0.1, 0.3, 0.7]),
        aborts=rng.choice([0.0, 0.02, 0.1]),
        losses=rng.choice([0.0, 0.0, 0.01, 0.05]) if "loss" in axes else 0.0,
        errors=rng.choice([0.0, 0.0, 0.02]) if "errors" in axes else 0.0,
        drains=rng.choice([0.0, 0.02]),
        stop_strings=rng.choice([0.0, 0.01, 0.05]),
        axes=axes,
    )


def draw_spec(rng: Random, axes: tuple[str, ...]) -> ExecutorSpec:
    """An executor's limits."""
    max_num_seqs = rng.randint(1, 8)
    block_size = rng.choice([1, 2, 4, 8])
    pages_per_state = rng.choice([0, 1, 3]) if "states" in axes else 0
    num_state_pages = pages_per_state * rng.choice([2, max_num_seqs, 2 * max_num_seqs])
    return ExecutorSpec(
        block_size=block_size,
        num_blocks=rng.randint(2, 12) * rng.choice([1, 2, 3]) * (4 if block_size == 1 else 1) + num_state_pages,
        pages_per_state=pages_per_state,
        num_slots=max_num_seqs + rng.randint(0, 4),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 3, 20]),
        max_model_len=rng.choice([24, 40, 60]),
        watermark=rng.choice([0.0, 0.1]),
        num_host_blocks=rng.choice([0, 3, 12, 40]) if "swap" in axes else 0,
        max_drafts=rng.choice([0, 0, 2, 5]) if "drafts" in axes else 0,
    )
