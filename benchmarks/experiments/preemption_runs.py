"""Experiment 6's runs: preempted requests, by rule, block size and pool size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.experiments.experiment import RunSettings
from benchmarks.experiments.repeats import Repeated
from benchmarks.experiments.simulated import Case, a100_13b, about, drawn, poisson, run
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_simulator.executor_profiles import ExecutorProfile
from cadenza_simulator.published import OPT_13B
from cadenza_simulator.step_costs import step_cost_function

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
