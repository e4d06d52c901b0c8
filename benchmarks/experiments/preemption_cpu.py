"""Experiment 6 on the real services: the demo model on this machine's CPU, with host blocks to swap to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.common.checkpoints import DEMO_MODEL
from benchmarks.common.rows import BenchmarkError
from benchmarks.experiments.experiment import RunSettings
from benchmarks.experiments.preemption_runs import (
    AUTO,
    BESIDE,
    CONTEXT,
    DECODES,
    HOST_POOLS,
    MICRO_TOKENS,
    OWN_STEP,
    RECOMPUTE,
    SWAP,
    Outcome,
    Preempted,
    paced_values,
    swap_name,
)
from benchmarks.experiments.repeats import Repeated
from benchmarks.experiments.served import Server
from benchmarks.experiments.simulated import drawn, fixed, poisson
from cadenza.v1.admin_pb2 import StepRecord
from cadenza_loadtest.measures.latencies import end_of
from cadenza_loadtest.requests import RequestShape

TOGETHER = "all blocks of a layer together"
"""How the CPU executor moves blocks."""
_OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 64}
_LOAD = {"input_len": "uniform:16:112", "output_len": "exponential:128:8:512"}
_NUM_SLOTS = 3072
"""Tokens of the whole pool: about 16 sequences. More do not keep a CPU busier, so a larger pool is seldom full."""
_POOL = 0.5
"""Share of the pool for the comparison of block sizes."""
_SIZE = 16
_WARM_UP = fixed([256] * 8, [16] * 8)
_NUM_NEWCOMERS = 10


def measured(settings: RunSettings) -> Outcome:
    """Measure all rules, each on a separate server; takes a few minutes."""
    sizes, pools = ((_SIZE,), (_POOL,)) if settings.quick else ((8, _SIZE, 64), (_POOL, 1.0))
    count, num_slots = (16, _NUM_SLOTS // 2) if settings.quick else (60, _NUM_SLOTS)
    shapes = drawn(_LOAD, count, settings.seed)
    rate = 20.0 if settings.quick else _capacity(shapes, settings.seed)
    moves = _Moves()

    def under(rule: str, size: int, pool: float) -> Preempted:
        with Server(DEMO_MODEL, _options(rule, size, int(pool * num_slots))) as server:
            server.load(_WARM_UP)
            at_once, records = server.watched_load(shapes, seed=settings.seed)
            paced = server.load(shapes, poisson(rate, count, settings.seed), seed=settings.seed)
        moves.add(records, size)
        per_s = float(at_once.num_output_tokens.sum()) / end_of(at_once)
        return Preempted(*(Repeated((x,)) for x in (per_s, *paced_values(paced, int(paced.num_preemptions.sum())))))

    policies = (RECOMPUTE, SWAP, AUTO)
    combinations = [(size, _POOL) for size in sizes] + [(_SIZE, pool) for pool in pools if pool != _POOL]
    # The rules take turns, so that other load on this machine does not favour one of them.
    found = {(rule, size, pool): under(rule, size, pool) for size, pool in combinations for rule in policies}
    own_ms, beside_ms = _computed_ms()
    return Outcome(
        setup={
            "model": "models/cadenza-demo on the CPU, bf16",
            "KV pool": f"{num_slots:,} tokens, {HOST_POOLS} times as many on the host; by block size: {_POOL:.0%} of "
            "it",
            "requests": f"{count}, prompts {_LOAD['input_len']}, outputs {_LOAD['output_len']} tokens, all at once, "
            f"and at {rate:.2g}/s (Poisson), the rate of recompute with all at once in {_POOL:.0%} of the pool",
        },
        layout=TOGETHER,
        by_size={rule: {size: found[rule, size, _POOL] for size in sizes} for rule in policies},
        by_pool={rule: {pool: found[rule, _SIZE, pool] for pool in pools} for rule in policies},
        micro_ms={
            swap_name(TOGETHER): {size: 2 * -(-MICRO_TOKENS // size) * moves.block_ms(size) for size in sizes},
            OWN_STEP: dict.fromkeys(sizes, own_ms),
            BESIDE: dict.fromkeys(sizes, beside_ms),
        },
    )


def _options(rule: str, size: int, num_slots: int) -> dict[str, Any]:
    num_blocks = num_slots // size
    blocks = {"block_size": size, "num_gpu_blocks": num_blocks, "num_cpu_blocks": HOST_POOLS * num_blocks}
    return {**_OPTIONS, **blocks, "preemption": rule}


def _capacity(shapes: Sequence[RequestShape], seed: int) -> float:
    """Requests per second with recompute, all at once."""
    with Server(DEMO_MODEL, _options(RECOMPUTE, _SIZE, int(_POOL * _NUM_SLOTS))) as server:
        server.load(_WARM_UP)
        return len(shapes) / end_of(server.load(shapes, seed=seed))


class _Moves:
    """The time to move a block, by its size, from all steps that moved blocks."""

    def __init__(self) -> None:
        self._ns: dict[int, int] = defaultdict(int)
        self._num_blocks: dict[int, int] = defaultdict(int)

    def add(self, records: Iterable[StepRecord], size: int) -> None:
        """Add a run's steps, in order."""
        self._num_blocks[size] += num_moved_blocks(records, size)
        self._ns[size] += sum(record.timings.moves_ns for record in records)

    def block_ms(self, size: int) -> float:
        """Milliseconds per block, one way; raises BenchmarkError if none was moved."""
        if not self._num_blocks[size]:
            raise BenchmarkError(f"no block of {size} tokens was moved: the load is too small for the pool")
        return self._ns[size] / self._num_blocks[size] / 1e6


def num_moved_blocks(records: Iterable[StepRecord], size: int) -> int:
    """Blocks of `size` tokens that these steps swapped out and in; `records` in order, from the first join."""
    stored: dict[int, int] = {}
    count = 0
    for record in records:
        for sequence_id in (*record.swapped_out_ids, *record.swapped_in_ids):
            count += -(-stored[sequence_id] // size)
        for each, context, num_tokens in zip(record.sequence_ids, record.context_lens, record.num_tokens, strict=True):
            stored[each] = context + num_tokens
    return count


def _computed_ms() -> tuple[float, float]:
    """Time of 256 tokens in a separate step, and their extra time in a step of 20 decodes; by the device's clock.

    With one slot more than there are decodes, one new request after the other is computed beside them.
    """
    with Server(DEMO_MODEL, {**_OPTIONS, "max_num_seqs": DECODES + 1, "num_gpu_blocks": 1024}) as server:
        server.load(_WARM_UP)
        alone = [server.watched_load(fixed([MICRO_TOKENS], [1]), seed=seed)[1] for seed in range(_NUM_NEWCOMERS)]
        shapes = fixed(
            [CONTEXT] * DECODES + [MICRO_TOKENS] * _NUM_NEWCOMERS,
            [10 * _NUM_NEWCOMERS] * DECODES + [2] * _NUM_NEWCOMERS,
        )
        _, records = server.watched_load(shapes)
    own_ms = _device_ms([record for run in alone for record in run], 1, MICRO_TOKENS)
    return own_ms, _device_ms(records, DECODES + 1, DECODES + MICRO_TOKENS) - _device_ms(records, DECODES, DECODES)


def _device_ms(records: Iterable[StepRecord], num_sequences: int, num_tokens: int) -> float:
    """The median time of a step with these numbers of sequences and tokens; raises BenchmarkError if there was none."""
    found = [
        record.timings.device_ns / 1e6
        for record in records
        if len(record.sequence_ids) == num_sequences and sum(record.num_tokens) == num_tokens
    ]
    if not found:
        raise BenchmarkError(f"no step computed {num_tokens} tokens of {num_sequences} sequences")
    return median(found)
