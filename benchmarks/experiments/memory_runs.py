"""Experiment 3's runs: the same requests with reserved memory and in blocks, and the use of the pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

from benchmarks.common.rows import BenchmarkError
from benchmarks.experiments.contiguous import Allocator, ContiguousReservation, NumSlots
from benchmarks.experiments.stepping import step_through
from cadenza_loadtest.requests import RequestShape
from cadenza_loadtest.workloads.published import lognormal_text
from cadenza_simulator.executor_profiles import ExecutorProfile
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.policies.batching import BatchingPolicy
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.sequence import Sequence

SHARES = ("stored", "reserved", "internal", "external")
MAX, POW2, ORACLE, BLOCKS = "to the maximum", "to a power of two", "by an oracle", "blocks of 16"
SHAREGPT = {"workload": "sharegpt"}
ALPACA = {"input_len": lognormal_text(19.31, 0.8, 4, 1024), "output_len": lognormal_text(58.45, 0.8, 4, 1024)}
"""The means are printed in the vLLM paper (figure 11); distribution and sigma are assumed, as for ShareGPT."""


@dataclass(frozen=True, slots=True)
class Held:
    """Results of one run."""

    shares: tuple[float, float, float, float]
    """Shares of the pool, in the order of SHARES."""
    num_sequences: float
    """Mean number of running sequences."""
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """All results of the experiment at one place."""

    setup: Mapping[str, str]
    num_slots: int
    """Tokens of the pool."""
    systems: Mapping[str, Many[Held]]
    """By allocation method, then by seed."""
    by_size: Mapping[str, Mapping[int, Many[Held]]]
    """By load and block size in tokens, then by seed."""


class Picture:
    """The use of the pool's slots while requests wait for memory; each step is weighted by its duration.

    Stored: slots with KV. Reserved: held by running sequences, which will need them. Internal: held by running
    sequences, which never will. External: free, but not enough for a waiting request.
    """

    def __init__(self, num_requests: int, batching: BatchingPolicy) -> None:
        self._begins_at = 0.75 * num_requests
        """The first quarter of the requests is left out, because all began at the same time."""
        self._batching = batching
        self._seconds = 0.0
        self._sums = [0.0] * 5

    def look(self, core: Scheduler, seconds: float) -> None:
        """Observe the core; called by `step_through`."""
        if not len(core.waiting) or len(core.groups) > self._begins_at:
            return
        lane = core.lanes[0]
        size, stored, needed, held = lane.spec.block_size, 0, 0, 0
        # The core frees the blocks of ending sequences when it plans their last step, but they are in use until it
        # ends.
        ending = [(sequence, self._num_blocks(lane, sequence)) for sequence in lane.finishing]
        for sequence, num_blocks in [*((each, len(each.block_ids)) for each in lane.running), *ending]:
            num_slots_held = num_blocks * size
            held += num_slots_held
            stored += sequence.num_computed_tokens
            needed += min(num_slots_held, sequence.max_len - 1)
        pool = lane.spec.num_blocks * size
        parts = (stored, needed - stored, held - needed, pool - held)
        values = (*(part / pool for part in parts), float(len(lane.running) + len(ending)))
        self._seconds += seconds
        self._sums = [total + seconds * value for total, value in zip(self._sums, values, strict=True)]

    def _num_blocks(self, lane: Lane, sequence: Sequence) -> int:
        reserved_tokens = self._batching.num_reserved_tokens(sequence)
        return lane.blocks.num_blocks_for(max(sequence.num_computed_tokens, reserved_tokens))

    def held(self, output_tokens_per_s: float) -> Held:
        """The mean shares; raises BenchmarkError if no request waited."""
        if not self._seconds:
            raise BenchmarkError("no request waited for memory: the load is too small for the pool")
        stored, reserved, internal, external, num_sequences = (total / self._seconds for total in self._sums)
        return Held((stored, reserved, internal, external), num_sequences, output_tokens_per_s)


def reserved(
    profile: ExecutorProfile, shapes: Many[RequestShape], num_slots: NumSlots, allocator: Callable[[int], Allocator]
) -> Held:
    """Run with contiguous ranges, allocated at admission."""
    slots = profile.changed({"block_size": 1})
    policy = ContiguousReservation(allocator(slots.limits.pool_size), num_slots)
    return _seen(slots, shapes, Policies(batching=policy), watermark=0.0)


def paged(profile: ExecutorProfile, shapes: Many[RequestShape], block_size: int) -> Held:
    """Run with blocks, allocated as they are needed: Cadenza's own allocation."""
    return _seen(profile.changed({"block_size": block_size}), shapes, Policies(), watermark=0.01)


def _seen(profile: ExecutorProfile, shapes: Many[RequestShape], policies: Policies, watermark: float) -> Held:
    picture = Picture(len(shapes), policies.batching)
    stepped = step_through(profile, shapes, picture.look, policies=policies, watermark=watermark)
    return picture.held(sum(shape.num_output_tokens for shape in shapes) / stepped.duration_s)
