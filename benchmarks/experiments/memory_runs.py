"""Experiment 3's runs: the same requests with reserved memory and in blocks, and the use of the pool.

On the real services the use of the pool comes from the scheduler's own step records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.common.checkpoints import DEMO_MODEL, max_model_len
from benchmarks.common.rows import BenchmarkError
from benchmarks.experiments.contiguous import Allocator, ContiguousReservation, NumSlots
from benchmarks.experiments.experiment import RunSettings
from benchmarks.experiments.served import Server
from benchmarks.experiments.simulated import drawn, fixed, step_through
from cadenza.v1.admin_pb2 import StepRecord
from cadenza_loadtest.measures.latencies import end_of
from cadenza_loadtest.requests import Floats, RequestShape
from cadenza_loadtest.workloads.lengths import lognormal_text
from cadenza_simulator.executor_profiles import ExecutorProfile
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.policies.batching import BatchingPolicy
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.sequence import Sequence as CoreSequence

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
    systems: Mapping[str, Sequence[Held]]
    """By allocation method, then by seed."""
    by_size: Mapping[str, Mapping[int, Sequence[Held]]]
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

    def _num_blocks(self, lane: Lane, sequence: CoreSequence) -> int:
        reserved_tokens = self._batching.num_reserved_tokens(sequence)
        return lane.blocks.num_blocks_for(max(sequence.num_computed_tokens, reserved_tokens))

    def held(self, output_tokens_per_s: float) -> Held:
        """The mean shares; raises BenchmarkError if no request waited."""
        if not self._seconds:
            raise BenchmarkError("no request waited for memory: the load is too small for the pool")
        stored, reserved, internal, external, num_sequences = (total / self._seconds for total in self._sums)
        return Held((stored, reserved, internal, external), num_sequences, output_tokens_per_s)


def reserved(
    profile: ExecutorProfile, shapes: Sequence[RequestShape], num_slots: NumSlots, allocator: Callable[[int], Allocator]
) -> Held:
    """Run with contiguous ranges, allocated at admission."""
    slots = profile.changed({"block_size": 1})
    policy = ContiguousReservation(allocator(slots.limits.pool_size), num_slots)
    return _seen(slots, shapes, Policies(batching=policy), watermark=0.0)


def paged(profile: ExecutorProfile, shapes: Sequence[RequestShape], block_size: int) -> Held:
    """Run with blocks, allocated as they are needed: Cadenza's own allocation."""
    return _seen(profile.changed({"block_size": block_size}), shapes, Policies(), watermark=0.01)


def _seen(profile: ExecutorProfile, shapes: Sequence[RequestShape], policies: Policies, watermark: float) -> Held:
    picture = Picture(len(shapes), policies.batching)
    stepped = step_through(profile, shapes, picture.look, policies=policies, watermark=watermark)
    return picture.held(sum(shape.num_output_tokens for shape in shapes) / stepped.duration_s)


_NUM_SLOTS = 15_696
"""Tokens in the pool of the published A100, as in virtual time."""
_SIZE = 16
_MAX_NUM_SEQS = 64
_WARM_UP = fixed([256] * 8, [16] * 8)
"""Warm-up requests that do not count: the first steps of a process take longer."""
_QUICK = {"input_len": "uniform:16:512", "output_len": "uniform:8:64"}

SlotsHeld = Callable[[int], int]
"""Slots that a sequence holds, from the most tokens that it has had."""


def measured(settings: RunSettings) -> Outcome:
    """Reservation to the maximum, and blocks of all sizes that the executor supports; takes a few minutes.

    Ranges of one length leave no gaps except the pool's remainder, so a range is free exactly while fewer sequences run
    than the pool has ranges: `max_num_seqs` is set to that number, and each sequence counts as holding the greatest
    length.
    """
    longest = max_model_len(DEMO_MODEL)
    assert longest is not None
    num_slots, count = (_NUM_SLOTS // 3, 32) if settings.quick else (_NUM_SLOTS, 120)
    shapes = drawn(_QUICK if settings.quick else SHAREGPT, count, settings.seed)
    sizes = (_SIZE, 64) if settings.quick else (8, _SIZE, 32, 64)

    def serve(size: int, num_seqs: int, slots_held: SlotsHeld) -> list[Held]:
        options = {"device": "cpu", "block_size": size, "num_gpu_blocks": num_slots // size, "max_num_seqs": num_seqs}
        with Server(DEMO_MODEL, options) as server:
            server.load(_WARM_UP, seed=settings.seed + 1)
            columns, records = server.watched_load(shapes, seed=settings.seed)
        return [held(records, num_slots, slots_held, float(columns.num_output_tokens.sum()) / end_of(columns))]

    reserved = serve(_SIZE, num_slots // longest, lambda most: longest)
    by_size = {size: serve(size, _MAX_NUM_SEQS, in_blocks(size)) for size in sizes}
    return Outcome(
        setup={
            "model": "models/cadenza-demo on the CPU, bf16",
            "KV pool": f"{num_slots:,} tokens; reserved to the maximum, {longest:,} for each of "
            f"{num_slots // longest} sequences",
            "requests": f"{count} with ShareGPT's mean lengths, all at once",
            "measured": "by WatchSteps, while requests wait, after the first quarter of them",
        },
        num_slots=num_slots,
        systems={MAX: reserved, **{f"blocks of {size}": runs for size, runs in by_size.items()}},
        by_size={"ShareGPT": by_size},
    )


def in_blocks(size: int) -> SlotsHeld:
    """Slots held in blocks of `size` tokens, including the last, partly filled block."""
    return lambda most: -(-most // size) * size


def held(records: Sequence[StepRecord], num_slots: int, slots_held: SlotsHeld, output_tokens_per_s: float) -> Held:
    """Shares of the pool while requests wait, after the first quarter has ended; each step is weighted by its duration,
    from the previous result to its own. See `memory_runs.Picture` for the shares.

    `records`: all steps from before the first request joined until the last has left, in order. Raises BenchmarkError
    if no request waited, or if the scheduler's token count differs from the sum of its records.
    """
    accounting, seconds, sums, before_ns = _PoolAccounting(records), 0.0, np.zeros(5), 0
    for record in records:
        accounting.planned(record)
        if record.load.num_waiting and accounting.num_left >= len(accounting.needs) / 4:
            step_s = (record.applied_ns - before_ns) / 1e9
            seconds += step_s
            sums += step_s * accounting.picture(num_slots, slots_held)
        accounting.applied(record)
        before_ns = record.applied_ns
    if not seconds:
        raise BenchmarkError("no request waited for memory: the load is too small for the pool")
    stored, reserved, internal, external, num_sequences = (sums / seconds).tolist()
    return Held((stored, reserved, internal, external), num_sequences, output_tokens_per_s)


class _PoolAccounting:
    """Running sequences and the KV tokens of each, step by step from the records."""

    def __init__(self, records: Sequence[StepRecord]) -> None:
        self._most = {join.sequence_id: join.num_prompt_tokens for record in records for join in record.joined}
        """Tokens for which each sequence has memory; the whole prompt's from the start."""
        # The last token's KV is never needed.
        self.needs = {
            leave.sequence_id: self._most[leave.sequence_id] + leave.num_output_tokens - 1
            for record in records
            for leave in record.left
        }
        """Tokens whose KV each sequence will have stored in the end."""
        self.num_left = 0
        self._stored: dict[int, int] = {}

    def planned(self, record: StepRecord) -> None:
        """Apply a planned step, including the sequences that end with it."""
        for sequence_id in record.preempted_ids:
            self._stored.pop(sequence_id, None)
        for each, context, count in zip(record.sequence_ids, record.context_lens, record.num_tokens, strict=True):
            self._stored[each] = context + count
            self._most[each] = max(self._most[each], context + count)

    def applied(self, record: StepRecord) -> None:
        """Remove the sequences that end with the step."""
        for leave in record.left:
            self._stored.pop(leave.sequence_id, None)
        self.num_left += len(record.left)
        # The scheduler's count excludes sequences that end with this step: their blocks are freed when that is planned.
        if sum(self._stored.values()) != record.load.num_stored_tokens:
            raise BenchmarkError(
                f"step {record.step_id}: the scheduler counts {record.load.num_stored_tokens} tokens with KV, its "
                f"records {sum(self._stored.values())}"
            )

    def picture(self, num_slots: int, slots_held: SlotsHeld) -> Floats:
        """[5] stored, reserved, internal and external share of the pool; sequences at once."""
        held_slots = {each: slots_held(self._most[each]) for each in self._stored}
        stored, taken = sum(self._stored.values()), sum(held_slots.values())
        needed = sum(min(slots, self.needs[each]) for each, slots in held_slots.items())
        parts = np.array([stored, needed - stored, taken - needed, num_slots - taken]) / num_slots
        return np.append(parts, len(self._stored))
