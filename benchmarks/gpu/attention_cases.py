"""Decode attention as a share of the bandwidth, prefill attention beside PyTorch's, and their tiles to choose from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.attention_runs import Inputs, Sizes, arch_and_sms, check, launch, make_inputs
from benchmarks.gpu.cases import Bench, Case, Goal, Group, Metrics, one_line
from executor_svc.gpu.kernels.attention.config import COPIED_BLOCK, DECODE_ROWS, AttentionConfig

if TYPE_CHECKING:
    from executor_svc.gpu.kernels.attention.call import AttentionCall

_MOST_CHECKED = 8192
_BATCHES, _CONTEXTS = (1, 4, 16, 64, 256), (1024, 4096, 8192, 32768)
_LENGTHS = (8192, 32768, 1024, 4096, 16384)
_TINY = Sizes(2, 40, num_kv_heads=2, group=2, head_size=64)
_BLOCK_SIZES = (16, COPIED_BLOCK)
DECODE_GOAL, PREFILL_GOAL = Goal("percent_of_copy", at_least=90), Goal("ratio", at_most=1.43)

DECODE_TILES = tuple(
    AttentionConfig(DECODE_ROWS, tile, warps, stages)
    for tile, warps, stages in (
        (64, 4, 3), (64, 4, 4), (64, 4, 2), (64, 2, 3), (64, 2, 4), (64, 8, 3), (64, 8, 4), (32, 4, 4), (32, 4, 6),
        (32, 2, 4), (32, 2, 6), (128, 4, 2), (128, 8, 2), (128, 8, 3),
    )
)  # fmt: skip
COPIED_DECODE_TILES = tuple(
    AttentionConfig(DECODE_ROWS, tile, warps, stages, copies=True)
    for tile, warps, stages in ((64, 4, 3), (64, 4, 4), (64, 4, 2), (64, 8, 3), (64, 8, 4), (32, 4, 4), (32, 4, 6))
)
PREFILL_TILES = tuple(
    AttentionConfig(*tile)
    for tile in (
        (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2),
        (64, 64, 4, 4), (64, 128, 4, 2), (64, 32, 4, 4), (128, 32, 8, 4),
    )
)  # fmt: skip
COPIED_PREFILL_TILES = tuple(
    AttentionConfig(*tile, copies=True)
    for tile in ((128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 4), (128, 32, 8, 4))
)
"""Candidates. Compiled for sm_90 with bf16 they spill nothing, or 40 bytes; with an fp8 cache some of the first do."""
_TUNED_DECODE = (Sizes(256, 1024), Sizes(64, 8192), Sizes(16, 8192), Sizes(1, 32768))
_TUNED_PREFILL = (Sizes(1, 8192, num_tokens=8192), Sizes(1, 32768, num_tokens=32768))


# ---------------------------------------------------------------- decode


def decode_cases(tiny: bool) -> Sequence[Case]:
    """bf16 before fp8, GQA 4 before 8; the middle of the table before its corners, as those are met in serving."""
    return [_decode(each) for each in decode_sizes(tiny)]


def _decode(sizes: Sizes) -> Case:
    return decode_case(sizes, _time_decode, 3.0, DECODE_GOAL)


def decode_sizes(tiny: bool) -> list[Sizes]:
    """The batches of which decode attention is timed; the tiny ones are in bf16 alone."""
    if tiny:
        return [_TINY, replace(_TINY, batch=1, context=300)]
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
    """A measurement of one of these batches, with its name and parameters."""
    kv = "fp8" if sizes.fp8 else "bf16"
    params = {
        "batch": sizes.batch, "context": sizes.context, "gqa": sizes.group, "kv": kv,
        "kv_heads": sizes.num_kv_heads, "head_size": sizes.head_size, "block_size": sizes.block_size,
    }  # fmt: skip
    name = f"{kv} gqa{sizes.group} batch {sizes.batch} context {sizes.context} blocks of {sizes.block_size}"
    return Case(name, params, lambda bench: run(bench, sizes), estimate_s, goal)


def _time_decode(bench: Bench, sizes: Sizes) -> Metrics:
    inputs = make_inputs(bench, sizes)
    work, out = launch(bench, sizes, inputs)
    work()
    if sizes.context <= _MOST_CHECKED:
        check(inputs, sizes, out)
    return _bandwidth(bench, sizes.kv_bytes, bench.clock.seconds(work))


def _bandwidth(bench: Bench, size: int, seconds: float) -> Metrics:
    return {
        "us": 1e6 * seconds,
        "tb_per_s": size / seconds / 1e12,
        "percent_of_copy": 100 * size / seconds / bench.ceilings.copy,
        "percent_of_read": 100 * size / seconds / bench.ceilings.read,
    }


# ---------------------------------------------------------------- prefill


def prefill_cases(tiny: bool) -> Sequence[Case]:
    """One prompt, whole, head 128, GQA 4; a 2k chunk behind 30k of context, and eight prompts of 1k, beside it."""
    if tiny:
        return [_prefill(replace(_TINY, batch=1, num_tokens=40)), _prefill(replace(_TINY, context=70, num_tokens=20))]
    sizes = [Sizes(1, length, num_tokens=length) for length in _LENGTHS]
    sizes += [Sizes(8, 1024, num_tokens=1024), Sizes(1, 32768, num_tokens=2048)]
    return [_prefill(each) for each in sizes]


def _prefill(sizes: Sizes) -> Case:
    params = {
        "batch": sizes.batch, "context": sizes.context, "num_tokens": sizes.num_tokens, "gqa": sizes.group,
        "kv_heads": sizes.num_kv_heads, "head_size": sizes.head_size, "block_size": sizes.block_size,
    }  # fmt: skip
    name = f"{sizes.batch} x {sizes.num_tokens} tokens of {sizes.context} blocks of {sizes.block_size}"
    return Case(name, params, lambda bench: _time_prefill(bench, sizes), 6.0, PREFILL_GOAL)


def flops(sizes: Sizes) -> int:
    """Of the scores and the weighted values: two products, of what is not masked."""
    before = sizes.context - sizes.num_tokens
    seen = sizes.num_tokens * before + sizes.num_tokens * (sizes.num_tokens + 1) // 2
    return 4 * sizes.batch * sizes.num_kv_heads * sizes.group * sizes.head_size * seen


def _time_prefill(bench: Bench, sizes: Sizes) -> Metrics:
    inputs = make_inputs(bench, sizes)
    work, out = launch(bench, sizes, inputs)
    work()
    if sizes.context <= _MOST_CHECKED:
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
    """Seconds that PyTorch takes with this backend, keys and values in one piece; None if it can not, which is said."""
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
    # Not every backend knows groups; what it then reads more is little beside what it multiplies.
    k, v = (each.repeat_interleave(sizes.group, 1) for each in (k, v))
    try:
        return attempt()
    except RuntimeError as error:
        progress(f"  {name}: {one_line(error)}")
        return None


# ---------------------------------------------------------------- block sizes


def block_cases(tiny: bool) -> Sequence[Case]:
    """Blocks of 64 keys, which a Hopper GPU's copy engine fetches, beside those of 16."""
    decode = [_TINY] if tiny else [replace(each, fp8=fp8) for fp8 in (False, True) for each in _TUNED_DECODE]
    prefill = [replace(_TINY, batch=1, num_tokens=40)] if tiny else _TUNED_PREFILL
    cases = [_decode(replace(each, block_size=size)) for each in decode for size in _BLOCK_SIZES]
    return cases + [_prefill(replace(each, block_size=size)) for each in prefill for size in _BLOCK_SIZES]


# ---------------------------------------------------------------- tiles


def tune_decode_cases(tiny: bool) -> Sequence[Case]:
    """Each candidate on a few batches, bf16 and fp8."""
    if tiny:
        tiles = AttentionConfig(DECODE_ROWS, 32, 4, 2)
        return [_tune(_TINY, tiles), _tune(_TINY, replace(tiles, copies=True))]
    sizes = [replace(each, fp8=fp8) for fp8 in (False, True) for each in _TUNED_DECODE]
    return [_tune(each, config) for each in sizes for config in (*DECODE_TILES, *COPIED_DECODE_TILES)]


def tune_prefill_cases(tiny: bool) -> Sequence[Case]:
    """Each candidate on two prompts."""
    if tiny:
        return [_tune(replace(_TINY, batch=1, num_tokens=40), AttentionConfig(64, 32, 4, 2))]
    return [_tune(each, config) for each in _TUNED_PREFILL for config in (*PREFILL_TILES, *COPIED_PREFILL_TILES)]


def _tune(given: Sizes, config: AttentionConfig) -> Case:
    sizes = _as_copied(given, config)
    kv = "fp8" if sizes.fp8 else "bf16"
    params: dict[str, Any] = {
        "batch": sizes.batch, "context": sizes.context, "num_tokens": sizes.num_tokens, "kv": kv, "gqa": sizes.group,
        "rows": config.rows, "tile": config.tile, "num_warps": config.num_warps, "num_stages": config.num_stages,
        "block_size": sizes.block_size,
    }  # fmt: skip
    name = f"{kv} {sizes.batch} x {sizes.num_tokens} of {sizes.context}: {config.rows}x{config.tile}"
    name += f" warps {config.num_warps} stages {config.num_stages}" + " copied" * config.copies
    return Case(name, params, lambda bench: _time_tiles(bench, sizes, config), 3.0)


def _as_copied(sizes: Sizes, config: AttentionConfig) -> Sizes:
    """Sizes with the blocks that these tiles need."""
    return replace(sizes, block_size=COPIED_BLOCK) if config.copies else sizes


def _time_tiles(bench: Bench, sizes: Sizes, config: AttentionConfig) -> Metrics:
    inputs = make_inputs(bench, sizes)
    work, out = tuned_launch(bench, sizes, inputs, config)
    work()
    if sizes.context <= _MOST_CHECKED:
        check(inputs, sizes, out)
    seconds = bench.clock.seconds(work)
    if sizes.num_tokens == 1:
        return _bandwidth(bench, sizes.kv_bytes, seconds)
    return {"us": 1e6 * seconds, "tflop_per_s": flops(sizes) / seconds / 1e12}


def tuned_launch(
    bench: Bench, sizes: Sizes, inputs: Inputs, config: AttentionConfig
) -> tuple[Callable[[], None], torch.Tensor]:
    """What enqueues attention with these tiles in place of the usual ones, split or not as the plan would have it."""
    from executor_svc.gpu.kernels.attention.attention import attention
    from executor_svc.gpu.kernels.attention.split import scratch_floats, split_attention, wants_split

    arch, num_sms = arch_and_sms(bench.device)
    shape = sizes.shape
    call = _tuned_call(sizes, inputs, config)
    if not wants_split(sizes.batch, sizes.num_kv_heads, sizes.num_tokens, sizes.context, num_sms):
        return lambda: attention(call, arch), call.out
    size = scratch_floats(shape.num_heads, shape.num_kv_heads, sizes.head_size, num_sms)
    scratch = torch.empty(size, dtype=torch.float32, device=bench.device)
    return lambda: split_attention(call, arch, scratch, num_sms), call.out


def _tuned_call(sizes: Sizes, inputs: Inputs, config: AttentionConfig) -> AttentionCall:
    from executor_svc.gpu.kernels.attention.call import AttentionCall
    from executor_svc.gpu.kernels.attention.config import Phase

    @dataclass(frozen=True)
    class TunedCall(AttentionCall):
        """A call whose tiles are told."""

        def config(self, phase: Phase, arch: int) -> AttentionConfig:
            return config

    device, scales = inputs.q.device, inputs.plan.scales(inputs.kv_layer)
    k_scale, v_scale = (None, None) if scales is None else (scales.k, scales.v)
    starts = torch.arange(sizes.batch + 1, dtype=torch.int32, device=device) * sizes.num_tokens
    return TunedCall(
        q=inputs.q,
        kv_layer=inputs.kv_layer,
        query_start_loc=starts,
        seq_lens=torch.full((sizes.batch,), sizes.context, dtype=torch.int32, device=device),
        block_tables=inputs.block_tables.to(device),
        out=torch.empty(inputs.q.shape[0], inputs.q[0].numel(), dtype=inputs.q.dtype, device=device),
        scale=sizes.shape.scale,
        max_query_len=sizes.num_tokens,
        max_seq_len=sizes.context,
        k_scale=k_scale,
        v_scale=v_scale,
    )


# ---------------------------------------------------------------- compiling


def warm_cases(tiny: bool) -> Sequence[Case]:
    """Each kernel of the cases above once, on little, so that it is in Triton's cache: for several processes."""
    if tiny:
        return [_warm(_TINY, None)]
    short, wide, whole = Sizes(1, 512), Sizes(256, 16), Sizes(1, 256, num_tokens=256)
    decode = [replace(each, fp8=fp8) for each in (wide, short) for fp8 in (False, True)]
    cases = [_warm(replace(each, block_size=size), None) for each in (whole, *decode) for size in _BLOCK_SIZES]
    cases += [_warm(whole, config) for config in (*PREFILL_TILES, *COPIED_PREFILL_TILES)]
    return cases + [_warm(each, config) for each in decode for config in (*DECODE_TILES, *COPIED_DECODE_TILES)]


def _warm(given: Sizes, config: AttentionConfig | None) -> Case:
    sizes = given if config is None else _as_copied(given, config)
    return Case(f"{sizes} {config}", {}, lambda bench: _compile(bench, sizes, config), 15.0)


def _compile(bench: Bench, sizes: Sizes, config: AttentionConfig | None) -> Metrics:
    inputs = make_inputs(bench, sizes)
    work, _ = launch(bench, sizes, inputs) if config is None else tuned_launch(bench, sizes, inputs, config)
    work()
    if bench.device.type == "cuda":
        torch.cuda.synchronize()
    return {}


WARM = Group("warm", "kernels compiled", warm_cases, limit_s=60)
DECODE = Group("decode", "decode attention", decode_cases, limit_s=130)
PREFILL = Group("prefill", "prefill attention", prefill_cases, limit_s=60)
BLOCKS = Group("blocks", "attention by block size", block_cases, limit_s=80)
TUNE_DECODE = Group("tune-decode", "tiles of decode attention", tune_decode_cases, limit_s=200)
TUNE_PREFILL = Group("tune-prefill", "tiles of prefill attention", tune_prefill_cases, limit_s=200)
