"""Whole steps of models with random weights, run by the executor from plans, beside the hardware's limits."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.cases import Bench, Case, Goal, Group, Metrics, Unavailable, device_time, read_trace
from benchmarks.gpu.kernels.plan_driver import PlanDriver
from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_06B, SHARES, TINY, ModelShape, write_config

_CONTEXT = 1024
_WARM_STEPS, _STEPS, _TRACED_STEPS = 16, 64, 32
_PREFILL_TIMES = 5
_PREFILL_GOAL = 75.0
_BATCHED_TOKENS = 8192
_BLOCK_SIZE = 16


def _growth(tiny: bool) -> int:
    """Most tokens that a sequence grows by in a case."""
    return 10 if tiny else _WARM_STEPS + max(_STEPS, _TRACED_STEPS) + 8


def driver_options(most_seqs: int, context: int, tiny: bool, **chosen: str) -> dict[str, object]:
    """Options of the executor: blocks for `most_seqs` sequences of this context, and steps of 8k tokens.

    chosen: options that a group is about.
    """
    longest = context + _growth(tiny) if tiny else max(context, _BATCHED_TOKENS) + _growth(tiny)
    tokens = 64 if tiny else _BATCHED_TOKENS
    per_seq = -(-(context + _growth(tiny)) // _BLOCK_SIZE)
    return {
        "device": "cuda",
        "dtype": "auto",
        "numerics": "fast",
        "load_format": "dummy",
        "block_size": _BLOCK_SIZE,
        "num_gpu_blocks": max(most_seqs * per_seq, -(-longest // _BLOCK_SIZE)) + 64,
        "max_model_len": -(-longest // _BLOCK_SIZE) * _BLOCK_SIZE,
        "max_num_seqs": most_seqs,
        "max_num_batched_tokens": max(tokens, most_seqs),
        # The least that the executor takes; this driver has at most two plans in flight.
        "max_inflight_plans": 4,
    } | chosen


def _driver(bench: Bench, shape: ModelShape, most_seqs: int, context: int, chosen: Mapping[str, str]) -> PlanDriver:
    def make() -> PlanDriver:
        folder = write_config(shape, Path(tempfile.mkdtemp(prefix="cadenza-shape-")))
        return PlanDriver(folder, **driver_options(most_seqs, context, bench.tiny, **chosen))

    return bench.cached(f"driver {shape.name}", make)


def _open(bench: Bench, shape: ModelShape, most_seqs: int, context: int, chosen: Mapping[str, str]) -> PlanDriver:
    driver = _driver(bench, shape, most_seqs, context, chosen)
    driver.open()
    return driver


def _group(
    name: str,
    shape: ModelShape,
    batches: tuple[int, ...],
    prefills: tuple[tuple[int, int], ...],
    mixed: tuple[int, int] | None,
    decode_goals: Mapping[int, float],
    limit_s: float,
    **chosen: str,
) -> Group:
    def cases(tiny: bool) -> Sequence[Case]:
        model, context = (TINY, 40) if tiny else (shape, _CONTEXT)
        counts = (1, 3) if tiny else batches
        whole = ((1, 40), (2, 20)) if tiny and prefills else prefills
        driver = partial(_open, shape=model, most_seqs=max(counts), context=context, chosen=chosen)
        beside, length = (1, 8) if tiny or mixed is None else mixed
        return [
            *(_decode_case(model, driver, count, context, decode_goals.get(count)) for count in counts),
            *(_prefill_case(model, driver, *each) for each in whole),
            *([] if mixed is None else [_mixed_case(model, driver, beside, context, length)]),
            # Last: after a trace, later steps of the process may be slower.
            *(_traced_decode_case(model, driver, count, context) for count in counts),
            *([] if mixed is None else [_traced_mixed_case(model, driver, beside, context, length)]),
        ]

    def preload(bench: Bench) -> None:
        model, context, counts = (TINY, 40, (1, 3)) if bench.tiny else (shape, _CONTEXT, batches)
        _driver(bench, model, max(counts), context, chosen).wait_loaded()

    title = ", ".join([f"steps of {shape.name}, random weights, bf16", *map(" ".join, chosen.items())])
    return Group(name, title, cases, limit_s, preload)


def _decode_case(
    shape: ModelShape, driver: Callable[[Bench], PlanDriver], batch: int, context: int, goal: float | None
) -> Case:
    def run(bench: Bench) -> Metrics:
        warm, steps = (1, 3) if bench.tiny else (_WARM_STEPS, _STEPS)
        plans = driver(bench)
        plans.start(batch, context, _growth(bench.tiny))
        plans.decode(warm)
        step_s = statistics.median(plans.decode(steps))
        floor_s = shape.decode_bytes(batch, context + warm + steps // 2) / bench.ceilings.copy
        return {
            "ms": 1e3 * step_s,
            "floor_ms": 1e3 * floor_s,
            "percent_of_limit": 100 * floor_s / step_s,
            "tokens_per_s": batch / step_s,
        }

    params = {"model": shape.name, "phase": "decode", "batch": batch, "context": context}
    bound = None if goal is None else Goal("percent_of_limit", at_least=goal)
    return Case(f"decode, batch {batch}, context {context}", params, run, 20.0, bound)


def _mixed_case(
    shape: ModelShape, driver: Callable[[Bench], PlanDriver], batch: int, context: int, length: int
) -> Case:
    def run(bench: Bench) -> Metrics:
        warm, steps = (1, 1) if bench.tiny else (_WARM_STEPS, _STEPS)
        plans = driver(bench)
        plans.start(batch, context, _growth(bench.tiny))
        plans.mixed(length, warm)
        step_s = statistics.median(plans.mixed(length, steps))
        floor_s = _mixed_floor_s(shape, bench, batch, context + warm + steps // 2, length)
        return {"ms": 1e3 * step_s, "floor_ms": 1e3 * floor_s, "percent_of_limit": 100 * floor_s / step_s}

    params = {"model": shape.name, "phase": "mixed", "batch": batch, "context": context, "length": length}
    return Case(f"mixed, batch {batch}, context {context}, a prompt of {length}", params, run, 15.0)


def _mixed_floor_s(shape: ModelShape, bench: Bench, batch: int, context: int, length: int) -> float:
    """The longer of reading and multiplying the matrices, plus reading keys and values."""
    flops = shape.prefill_flops(1, length) + batch * shape.prefill_flops(1, 1)
    weights = shape.decode_bytes(0, 0)
    keys = shape.decode_bytes(batch, context) - weights
    return max(weights / bench.ceilings.copy, flops / bench.ceilings.matmul) + keys / bench.ceilings.copy


def _traced_decode_case(shape: ModelShape, driver: Callable[[Bench], PlanDriver], batch: int, context: int) -> Case:
    def run(bench: Bench) -> Metrics:
        warm, steps = (1, 2) if bench.tiny else (_WARM_STEPS, _TRACED_STEPS)
        plans = driver(bench)
        plans.start(batch, context, _growth(bench.tiny))
        plans.decode(warm)
        floor_s = shape.decode_bytes(batch, context + warm + steps // 2) / bench.ceilings.copy
        return _on_device(lambda: plans.decode(steps), steps, floor_s)

    params = {"model": shape.name, "phase": "decode", "batch": batch, "context": context, "traced": True}
    return Case(f"decode, batch {batch}, context {context}: on the device", params, run, 15.0)


def _traced_mixed_case(
    shape: ModelShape, driver: Callable[[Bench], PlanDriver], batch: int, context: int, length: int
) -> Case:
    def run(bench: Bench) -> Metrics:
        steps = 1 if bench.tiny else _TRACED_STEPS
        plans = driver(bench)
        plans.start(batch, context, _growth(bench.tiny))
        plans.mixed(length, 1)
        floor_s = _mixed_floor_s(shape, bench, batch, context + 1 + steps // 2, length)
        return _on_device(lambda: plans.mixed(length, steps), steps, floor_s)

    params = {
        "model": shape.name, "phase": "mixed", "batch": batch, "context": context, "length": length, "traced": True,
    }  # fmt: skip
    return Case(f"mixed, batch {batch}, context {context}, a prompt of {length}: on the device", params, run, 10.0)


def _on_device(work: Callable[[], object], steps: int, floor_s: float) -> Metrics:
    """Device time by torch.profiler, which slows the host. Raises Unavailable if the trace has no device."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    if not torch.cuda.is_available():
        activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        found = device_time(read_trace(path.read_bytes()), left_out=0.0)
    if found is None:
        raise Unavailable("the trace has no work of a device")
    return {
        "device_ms": 1e3 * found.busy_s / steps,
        "device_percent_of_limit": 100 * floor_s / (found.busy_s / steps),
        "idle_percent": 100 * found.idle_share,
        "kernels": found.num_kernels / steps,
    }


def _prefill_case(shape: ModelShape, driver: Callable[[Bench], PlanDriver], count: int, length: int) -> Case:
    def run(bench: Bench) -> Metrics:
        plans = driver(bench)
        plans.prefill(count, length, 1)
        step_s = statistics.median(plans.prefill(count, length, 1 if bench.tiny else _PREFILL_TIMES))
        floor_s = shape.prefill_flops(count, length) / bench.ceilings.matmul
        return {
            "ms": 1e3 * step_s,
            "floor_ms": 1e3 * floor_s,
            "percent_of_limit": 100 * floor_s / step_s,
            "tokens_per_s": count * length / step_s,
        }

    params = {"model": shape.name, "phase": "prefill", "batch": count, "length": length}
    return Case(f"prefill, {count} x {length}", params, run, 20.0, Goal("percent_of_limit", at_least=_PREFILL_GOAL))


GOALS_8B = {count: 100 * share for count, share in SHARES.items()}
"""`percent_of_limit` of the 8B shape's decodes, by sequences."""
_GOALS_06B = dict.fromkeys((1, 4, 16, 64), 70.0)
_GOALS_EXACT = {count: round(0.9 * goal) for count, goal in GOALS_8B.items()}
GROUPS = {
    LLAMA_8B.name: _group("steps-8b", LLAMA_8B, (1, 4, 16, 64, 256), ((1, 8192), (8, 1024)), (128, 512), GOALS_8B, 165),
    QWEN3_06B.name: _group("steps-0.6b", QWEN3_06B, (1, 4, 16, 64), ((1, 8192),), (32, 512), _GOALS_06B, 95),
}
"""By the name of the shape."""
EXACT_SHAPE = LLAMA_8B.name
EXACT = _group("steps-8b-exact", LLAMA_8B, (64, 256), ((1, 8192),), (128, 512), _GOALS_EXACT, 110, numerics="exact")
"""In exact mode, to be held against `steps-8b`: its goals are nine tenths of those."""
_FEW = (1, 4, 16)
SKINNY = {
    LLAMA_8B.name: _group("steps-8b-skinny", LLAMA_8B, _FEW, (), None, GOALS_8B, 90, skinny_gemms="on"),
    QWEN3_06B.name: _group("steps-0.6b-skinny", QWEN3_06B, _FEW, (), None, _GOALS_06B, 60, skinny_gemms="on"),
}
"""Decodes by fused layers, to be held against those of `GROUPS`; by the name of the shape."""
EARLY_SHAPE = LLAMA_8B.name
EARLY = _group("steps-8b-pdl", LLAMA_8B, _FEW, (), None, GOALS_8B, 90, skinny_gemms="on", pdl="auto")
"""The same by kernels that begin early if the start finds that right, to be held against those of `SKINNY`."""
