"""Decode attention as a share of the bandwidth, prefill attention beside PyTorch's, both by block size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.cases import Bench, Case, Goal, Group, Metrics, one_line
from benchmarks.gpu.kernels.attention.attention_launch import Sizes, check, gluon_kernels_of, launch, make_inputs
from executor_svc.gpu.kernels.attention.config import COPIED_BLOCK

if TYPE_CHECKING:
    from executor_svc.gpu.kernels.gpu_kernels import GpuKernels

MAX_CHECKED = 8192
"""Longest context whose result is compared with float64."""
_BATCHES, _CONTEXTS = (1, 4, 16, 64, 256), (1024, 4096, 8192, 32768)
_LENGTHS = (8192, 32768, 1024, 4096, 16384)
TINY = Sizes(2, 40, num_kv_heads=2, group=2, head_size=64)
DRAFTED = tuple(Sizes(batch, 8192, num_tokens=6) for batch in (1, 4, 16, 64))
BLOCK_SIZES = (16, COPIED_BLOCK)
DECODE_GOAL, PREFILL_GOAL = Goal("percent_of_copy", at_least=90), Goal("ratio", at_most=1.43)

TUNED_DECODE = (Sizes(256, 1024), Sizes(64, 8192), Sizes(16, 8192), Sizes(1, 32768))
TUNED_PREFILL = (Sizes(1, 8192, num_tokens=8192), Sizes(1, 32768, num_tokens=32768))


# ---------------------------------------------------------------- decode


def decode_cases(tiny: bool) -> Sequence[Case]:
    """bf16 before fp8, GQA 4 before 8; then with 5 drafts, which the keys are read for at once."""
    drafted = [replace(TINY, context=300, num_tokens=3)] if tiny else DRAFTED
    return [_decode(each) for each in (*decode_sizes(tiny), *drafted)]


def _decode(sizes: Sizes) -> Case:
    return decode_case(sizes, _time_decode, 3.0, DECODE_GOAL if sizes.num_tokens == 1 else None)


def decode_sizes(tiny: bool) -> list[Sizes]:
    """The measured batches of decode attention; the tiny ones are in bf16 only."""
    if tiny:
        return [TINY, replace(TINY, batch=1, context=300)]
    return [
        Sizes(batch, context, group=group, fp8=fp8)
        for fp8 in (False, True)
        for group in (4, 8)
        for batch in _BATCHES
        for context in _CONTEXTS
    ]


def decode_case(
    sizes: Sizes, run: Callable[[Bench, Sizes], Metrics], estimate_s: float, goal: Goal | None = None
) -> Case:
    """The case of one of these batches, with its name and parameters."""
    kv = "fp8" if sizes.fp8 else "bf16"
    params = {
        "batch": sizes.batch, "context": sizes.context, "gqa": sizes.group, "kv": kv,
        "kv_heads": sizes.num_kv_heads, "head_size": sizes.head_size, "block_size": sizes.block_size,
    }  # fmt: skip
    name = f"{kv} gqa{sizes.group} batch {sizes.batch} context {sizes.context} blocks of {sizes.block_size}"
    if sizes.num_tokens > 1:
        name, params = f"{name}, {sizes.num_tokens} tokens", {**params, "num_tokens": sizes.num_tokens}
    return Case(name, params, lambda bench: run(bench, sizes), estimate_s, goal)


def _time_decode(bench: Bench, sizes: Sizes) -> Metrics:
    inputs = make_inputs(bench, sizes)
    work, out = launch(bench, sizes, inputs)
    work()
    if sizes.context <= MAX_CHECKED:
        check(inputs, sizes, out)
    return bandwidth(bench, sizes.kv_bytes, bench.clock.seconds(work))


def bandwidth(bench: Bench, size: int, seconds: float) -> Metrics:
    """Metrics of a launch that reads `size` bytes."""
    return {
        "us": 1e6 * seconds,
        "tb_per_s": size / seconds / 1e12,
        "percent_of_copy": 100 * size / seconds / bench.ceilings.copy,
        "percent_of_read": 100 * size / seconds / bench.ceilings.read,
    }


# ---------------------------------------------------------------- prefill


def prefill_cases(tiny: bool) -> Sequence[Case]:
    """Whole prompts, eight prompts of 1k tokens, and a chunk of 2k tokens after 30k; head size 128, GQA 4.

    Then the same by the Gluon kernel, beside Triton's: the last, as no GPU has run it.
    """
    if tiny:
        sizes = [replace(TINY, batch=1, num_tokens=40), replace(TINY, context=70, num_tokens=20)]
    else:
        sizes = [Sizes(1, length, num_tokens=length) for length in _LENGTHS]
        sizes += [Sizes(8, 1024, num_tokens=1024), Sizes(1, 32768, num_tokens=2048)]
    in_gluon = [*sizes, *(replace(each, block_size=COPIED_BLOCK) for each in sizes[:2])]
    return [_prefill(each) for each in sizes] + [_prefill_in_gluon(each) for each in in_gluon]


def _prefill_in_gluon(sizes: Sizes) -> Case:
    case = _prefill(sizes)

    def run(bench: Bench) -> Metrics:
        metrics = _time_prefill(bench, sizes, gluon_kernels_of(bench, sizes.block_size))
        inputs = make_inputs(bench, sizes)
        triton = bench.clock.seconds(launch(bench, sizes, inputs)[0])
        return metrics | {"triton_ms": 1e3 * triton, "over_triton": metrics["ms"] / (1e3 * triton)}

    return Case(f"gluon: {case.name}", {**case.params, "backend": "gluon"}, run, 8.0, PREFILL_GOAL)


def _prefill(sizes: Sizes) -> Case:
    params = {
        "batch": sizes.batch, "context": sizes.context, "num_tokens": sizes.num_tokens, "gqa": sizes.group,
        "kv_heads": sizes.num_kv_heads, "head_size": sizes.head_size, "block_size": sizes.block_size,
    }  # fmt: skip
    name = f"{sizes.batch} x {sizes.num_tokens} tokens of {sizes.context} blocks of {sizes.block_size}"
    return Case(name, params, lambda bench: _time_prefill(bench, sizes), 6.0, PREFILL_GOAL)


def flops(sizes: Sizes) -> int:
    """Operations of the two products, scores and weighted values, without masked elements."""
    before = sizes.context - sizes.num_tokens
    seen = sizes.num_tokens * before + sizes.num_tokens * (sizes.num_tokens + 1) // 2
    return 4 * sizes.batch * sizes.num_kv_heads * sizes.group * sizes.head_size * seen


def _time_prefill(bench: Bench, sizes: Sizes, kernels: GpuKernels | None = None) -> Metrics:
    """kernels: default: of `kernels_of`."""
    inputs = make_inputs(bench, sizes, kernels)
    work, out = launch(bench, sizes, inputs, kernels)
    work()
    if sizes.context <= MAX_CHECKED:
        check(inputs, sizes, out)
    seconds = bench.clock.seconds(work)
    metrics = {
        "ms": 1e3 * seconds,
        "tflop_per_s": flops(sizes) / seconds / 1e12,
        "percent_of_matmul": 100 * flops(sizes) / seconds / bench.ceilings.matmul,
    }
    if sizes.num_tokens != sizes.context:
        return metrics
    others = {name: found for name in ("cudnn", "flash") if (found := _time_sdpa(bench, sizes, name)) is not None}
    metrics |= {f"{name}_ms": 1e3 * found for name, found in others.items()}
    if others:
        metrics["ratio"] = seconds / min(others.values())
    return metrics


def _time_sdpa(bench: Bench, sizes: Sizes, name: str) -> float | None:
    """Seconds that PyTorch takes with this backend on contiguous keys and values; None, with a message, on an error."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from benchmarks.common.benchmark import progress

    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    heads = (sizes.num_kv_heads * sizes.group, sizes.num_kv_heads, sizes.num_kv_heads)
    q, k, v = (
        torch.randn(sizes.batch, count, sizes.context, sizes.head_size, device=bench.device).to(torch.bfloat16)
        for count in heads
    )

    def work() -> None:
        with sdpa_kernel([backends[name]]):
            scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    def attempt() -> float:
        return bench.clock.seconds(work)

    try:
        return attempt()
    except RuntimeError as error:
        progress(f"  {name} with grouped heads: {one_line(error)}")
    # Not every backend supports grouped heads; repeated heads cost little beside the products.
    k, v = (each.repeat_interleave(sizes.group, 1) for each in (k, v))
    try:
        return attempt()
    except RuntimeError as error:
        progress(f"  {name}: {one_line(error)}")
        return None


# ---------------------------------------------------------------- block sizes


def block_cases(tiny: bool) -> Sequence[Case]:
    """Blocks of 64 keys, which a Hopper GPU's copy engine fetches, beside blocks of 16."""
    decode = [TINY] if tiny else [replace(each, fp8=fp8) for fp8 in (False, True) for each in TUNED_DECODE]
    prefill = [replace(TINY, batch=1, num_tokens=40)] if tiny else TUNED_PREFILL
    cases = [_decode(replace(each, block_size=size)) for each in decode for size in BLOCK_SIZES]
    return cases + [_prefill(replace(each, block_size=size)) for each in prefill for size in BLOCK_SIZES]


DECODE = Group("decode", "decode attention", decode_cases, limit_s=130)
PREFILL = Group("prefill", "prefill attention", prefill_cases, limit_s=130)
BLOCKS = Group("blocks", "attention by block size", block_cases, limit_s=80)
