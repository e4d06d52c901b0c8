"""Refuses what the core does not support yet with several executors, instead of simulating it wrongly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cadenza.loadtest.requests import LoadTestError
from cadenza.simulate.executor_profiles import ExecutorProfile
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.sequences.sequence import Sequence as CoreSequence
from scheduler_svc.core.types import RequestSpec


def check_fleet(fleet: Sequence[ExecutorProfile], config: SchedulerConfig) -> None:
    """Raise LoadTestError for executors that cannot be combined, or not with these options."""
    if not fleet:
        raise LoadTestError("--executors: at least one is needed")
    if len({profile.limits.block_size for profile in fleet}) > 1:
        raise LoadTestError("--executor: all must have the same block_size; --block-size gives them one")
    if len(fleet) > 1 and config.preemption != "recompute":
        raise LoadTestError(
            f"--preemption {config.preemption}: several executors share one queue, and blocks swapped to the host of "
            "one cannot return to another: use recompute"
        )


def check_grows(spec: RequestSpec, lanes: Iterable[Lane]) -> None:
    """Raise LoadTestError for a request that may outgrow the pool of one of several executors."""
    for lane in lanes:
        held = lane.spec
        longest = min(len(spec.prompt_token_ids) + (spec.max_tokens or 0), held.max_model_len)
        if longest > held.num_blocks * held.block_size:
            raise LoadTestError(
                f"request {spec.request_id} may grow to {longest} tokens, and the KV pool of an executor has "
                f"{held.num_blocks * held.block_size}: with several executors each request must fit in each of them"
            )


def check_preempted(sequences: Iterable[CoreSequence]) -> None:
    """Raise LoadTestError for preempted samples of one request: they could resume on different executors."""
    for sequence in sequences:
        if len(sequence.group.sequences) > 1:
            raise LoadTestError(
                f"request {sequence.group.spec.request_id} has several samples or beams and was preempted; with "
                "several executors that cannot be simulated yet: give them more blocks (--num-gpu-blocks)"
            )
