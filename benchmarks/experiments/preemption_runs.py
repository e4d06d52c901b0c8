"""Experiment 6's runs: preempted requests, by rule, block size and pool size.

On the real services: the demo model on this machine's CPU, with host blocks to swap to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common.checkpoints import DEMO_MODEL
from benchmarks.common.rows import BenchmarkError
from benchmarks.experiments.experiment import Repeated, RunSettings
from benchmarks.experiments.served import Server
from benchmarks.experiments.simulated import Case, a100_13b, about, drawn, fixed, poisson, run
from cadenza.v1.admin_pb2 import StepRecord
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.latencies import end_of
from cadenza_loadtest.requests import RequestShape
from cadenza_simulator.executor_profiles import ExecutorProfile
from cadenza_simulator.lanes import step_cost_function
from cadenza_simulator.published import OPT_13B

RECOMPUTE, SWAP, AUTO = "recompute", "swap", "auto"
PIECEWISE, WHOLE = "a copy per layer", "a copy per block"
"""How a block is moved: K and V of each layer separately, as in vLLM in 2023, or all at once."""
OWN_STEP, BESIDE = "recompute, a step of its own", "recompute, beside 20 decodes"
_COPY_US = 2.3
"""Time of each copy besides its bytes: measured on an H20, layer by layer and block by block
(https://github.com/taco-project/FlexKV/pull/193)."""
MICRO_TOKENS = 256
DECODES, CONTEXT = 20, 500
_RATE = 1.5
"""Requests per second that half of the pool can just serve."""
_POOL = 0.5
"""Share of the published pool for the comparison of block sizes: every third request is preempted."""
HOST_POOLS = 4
"""Ratio of blocks in host memory to blocks on the device."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """Results of one rule in one setting."""

    output_tokens_per_s: Repeated
    """All requests at once."""
    latency_s: Repeated
    """At the rate; normalized as in the vLLM paper: the mean over requests of E2E / output tokens."""
    e2e_p99_s: Repeated
    """At the rate."""
    preemptions: Repeated
    """Preemptions per request, at the rate."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All results of the experiment."""

    setup: Mapping[str, str]
    layout: str
    """How a swap moves its blocks."""
    by_size: Mapping[str, Mapping[int, Preempted]]
    """By rule (in virtual time swaps once more, by copies per block) and block size, in tokens."""
    by_pool: Mapping[str, Mapping[float, Preempted]]
    """By rule and the pool's share of the whole one, with blocks of 16."""
    micro_ms: Mapping[str, Mapping[int, float]]
    """Time to restore 256 tokens, by method and block size."""


def swap_name(layout: str) -> str:
    """The name of a swap line."""
    return f"{SWAP}, {layout}"


def with_copies(profile: ExecutorProfile, layout: str) -> ExecutorProfile:
    """The profile with the fixed time of each copy, for OPT-13B's layers; without it, a profile counts only bytes."""
    copies = 2 * OPT_13B.num_layers if layout == PIECEWISE else 1
    moved_block_us = copies * _COPY_US + profile.costs.moved_block_us
    return profile.model_copy(update={"costs": profile.costs.model_copy(update={"moved_block_us": moved_block_us})})


def simulated(settings: RunSettings) -> Outcome:
    """On the published A100 with a 13B model and ShareGPT's lengths, as the vLLM paper's section 7.3."""
    profile, count = (a100_13b().changed({"num_gpu_blocks": 400}), 16) if settings.quick else (a100_13b(), 200)
    sizes = (1, 16, 256) if settings.quick else (1, 2, 4, 8, 16, 32, 64, 128, 256)
    pools = (0.4, 1.0) if settings.quick else (0.3, 0.5, 0.7, 1.0)
    seeds = range(settings.seed, settings.seed + (1 if settings.quick else 3))

    def under(rule: str, layout: str, block_size: int, pool: float) -> Preempted:
        resized = _resized(profile, layout, block_size, pool)
        runs = [_run(resized, rule, count, seed) for seed in seeds]
        return Preempted(*(Repeated(values) for values in zip(*runs, strict=True)))

    lines = {RECOMPUTE: PIECEWISE, SWAP: PIECEWISE, AUTO: PIECEWISE}
    by_size = {rule: {size: under(rule, layout, size, _POOL) for size in sizes} for rule, layout in lines.items()}
    by_size[swap_name(WHOLE)] = {size: under(SWAP, WHOLE, size, _POOL) for size in sizes[::2]}
    return Outcome(
        setup={
            **about(profile),
            "requests": f"{count} with ShareGPT's mean lengths, all at once, and at {_RATE:g}/s (Poisson)",
            "by block size": f"{_POOL:.0%} of the pool",
            "moving n tokens": f"80 copies of {_COPY_US} us for each block, and n times {_token_us(profile):.0f} us",
            "ranges in brackets": f"over {len(seeds)} seeds",
        },
        layout=PIECEWISE,
        by_size=by_size,
        by_pool={
            rule: {pool: by_size[rule][16] if pool == _POOL else under(rule, layout, 16, pool) for pool in pools}
            for rule, layout in lines.items()
        },
        micro_ms=_micro(profile, sizes),
    )


def _resized(profile: ExecutorProfile, layout: str, block_size: int, pool: float) -> ExecutorProfile:
    sized = profile.changed({"block_size": block_size})
    num_blocks = int(pool * sized.limits.pool_size)
    return with_copies(sized.changed({"num_gpu_blocks": num_blocks, "num_cpu_blocks": HOST_POOLS * num_blocks}), layout)


def _run(profile: ExecutorProfile, rule: str, count: int, seed: int) -> tuple[float, float, float, float]:
    """The fields of Preempted."""
    shapes = drawn({"workload": "sharegpt"}, count, seed)
    at_once = run(Case(profile, shapes, scheduler={"preemption": rule}))
    paced = run(Case(profile, shapes, poisson(_RATE, count, seed), scheduler={"preemption": rule}))
    return at_once.output_tokens_per_s, *paced_values(paced.requests, paced.outcome.num_preemptions)


def paced_values(paced: RequestColumns, num_preemptions: int) -> tuple[float, float, float]:
    """The fields of Preempted that are measured at the rate."""
    e2e = paced.last_s - paced.due_s
    normalized = float(np.mean(e2e / paced.num_output_tokens))
    return normalized, float(np.quantile(e2e, 0.99)), num_preemptions / len(paced)


def _micro(profile: ExecutorProfile, sizes: tuple[int, ...]) -> dict[str, dict[int, float]]:
    """By the cost model alone, in milliseconds."""
    step_cost = step_cost_function(profile.costs)
    count, pairs = MICRO_TOKENS, MICRO_TOKENS * (MICRO_TOKENS + 1) // 2
    own_ns = step_cost(count, pairs, count, 1, 0)[0]
    read = DECODES * CONTEXT
    decodes_ns = step_cost(DECODES, read, read, DECODES, 0)[0]
    beside_ns = step_cost(DECODES + count, read + pairs, read + count, DECODES, 0)[0] - decodes_ns

    def moved_ms(size: int, layout: str) -> float:
        sized = with_copies(profile.changed({"block_size": size}), layout)
        return 2 * -(-count // size) * sized.costs.moved_block_us / 1e3

    moved = {swap_name(layout): {size: moved_ms(size, layout) for size in sizes} for layout in (PIECEWISE, WHOLE)}
    computed = {name: dict.fromkeys(sizes, ns / 1e6) for name, ns in ((OWN_STEP, own_ns), (BESIDE, beside_ns))}
    return {**moved, **computed}


def _token_us(profile: ExecutorProfile) -> float:
    """Time to move a token's KV, one way."""
    return profile.costs.moved_block_us / profile.limits.block_size


TOGETHER = "all blocks of a layer together"
"""How the CPU executor moves blocks."""
_OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 64}
_LOAD = {"input_len": "uniform:16:112", "output_len": "exponential:128:8:512"}
_NUM_SLOTS = 3072
"""Tokens of the whole pool: about 16 sequences. More do not keep a CPU busier, so a larger pool is seldom full."""
_POOL_SHARE = 0.5
"""Share of the pool for the comparison of block sizes."""
_SIZE = 16
_WARM_UP = fixed([256] * 8, [16] * 8)
_NUM_NEWCOMERS = 10


def measured(settings: RunSettings) -> Outcome:
    """Measure all rules, each on a separate server; takes a few minutes."""
    sizes, pools = ((_SIZE,), (_POOL_SHARE,)) if settings.quick else ((8, _SIZE, 64), (_POOL_SHARE, 1.0))
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
    combinations = [(size, _POOL_SHARE) for size in sizes] + [(_SIZE, pool) for pool in pools if pool != _POOL_SHARE]
    # The rules take turns, so that other load on this machine does not favour one of them.
    found = {(rule, size, pool): under(rule, size, pool) for size, pool in combinations for rule in policies}
    own_ms, beside_ms = _computed_ms()
    return Outcome(
        setup={
            "model": "models/cadenza-demo on the CPU, bf16",
            "KV pool": f"{num_slots:,} tokens, {HOST_POOLS} times as many on the host; by block size: {_POOL_SHARE:.0%}"
            " of it",
            "requests": f"{count}, prompts {_LOAD['input_len']}, outputs {_LOAD['output_len']} tokens, all at once, "
            f"and at {rate:.2g}/s (Poisson), the rate of recompute with all at once in {_POOL_SHARE:.0%} of the pool",
        },
        layout=TOGETHER,
        by_size={rule: {size: found[rule, size, _POOL_SHARE] for size in sizes} for rule in policies},
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
    with Server(DEMO_MODEL, _options(RECOMPUTE, _SIZE, int(_POOL_SHARE * _NUM_SLOTS))) as server:
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
