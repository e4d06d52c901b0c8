"""Candidates for attention's tiles, and for how decode attention of few sequences shares keys among programs.

All attention kernels are compiled before they are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.cases import Bench, Case, Group, Metrics
from benchmarks.gpu.kernels.attention.attention import (
    BLOCK_SIZES,
    MAX_CHECKED,
    TINY,
    TUNED_DECODE,
    TUNED_PREFILL,
    bandwidth,
    flops,
)
from benchmarks.gpu.kernels.attention.attention_launch import Inputs, Sizes, arch_and_sms, check, launch, make_inputs
from executor_svc.gpu.kernels.attention.config import COPIED_BLOCK, DECODE_ROWS, AttentionConfig
from executor_svc.gpu.kernels.attention.segments import SEGMENTS, Segments, SegmentScratch

if TYPE_CHECKING:
    from executor_svc.gpu.kernels.attention.call import AttentionCall

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
"""Compiled for sm_90 they spill at most 40 bytes with a bf16 cache; with an fp8 cache some DECODE_TILES spill."""


def tune_decode_cases(tiny: bool) -> Sequence[Case]:
    """Each candidate on a few batches, bf16 and fp8."""
    if tiny:
        tiles = AttentionConfig(DECODE_ROWS, 32, 4, 2)
        return [_tune(TINY, tiles), _tune(TINY, replace(tiles, copies=True))]
    sizes = [replace(each, fp8=fp8) for fp8 in (False, True) for each in TUNED_DECODE]
    return [_tune(each, config) for each in sizes for config in (*DECODE_TILES, *COPIED_DECODE_TILES)]


def tune_prefill_cases(tiny: bool) -> Sequence[Case]:
    """Each candidate on two prompts."""
    if tiny:
        return [_tune(replace(TINY, batch=1, num_tokens=40), AttentionConfig(64, 32, 4, 2))]
    return [_tune(each, config) for each in TUNED_PREFILL for config in (*PREFILL_TILES, *COPIED_PREFILL_TILES)]


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
    """Sizes with the block size that these tiles need."""
    return replace(sizes, block_size=COPIED_BLOCK) if config.copies else sizes


def _time_tiles(bench: Bench, sizes: Sizes, config: AttentionConfig) -> Metrics:
    inputs = make_inputs(bench, sizes)
    work, out = tuned_launch(bench, sizes, inputs, config)
    work()
    if sizes.context <= MAX_CHECKED:
        check(inputs, sizes, out)
    seconds = bench.clock.seconds(work)
    if sizes.num_tokens == 1:
        return bandwidth(bench, sizes.kv_bytes, seconds)
    return {"us": 1e6 * seconds, "tflop_per_s": flops(sizes) / seconds / 1e12}


def tuned_launch(
    bench: Bench, sizes: Sizes, inputs: Inputs, config: AttentionConfig, segments: Segments = SEGMENTS
) -> tuple[Callable[[], None], torch.Tensor]:
    """A function that enqueues attention with these tiles, split or not as the plan decides, and its output."""
    from executor_svc.gpu.kernels.attention.attention import attention
    from executor_svc.gpu.kernels.attention.split import split_attention

    arch, num_sms = arch_and_sms(bench.device)
    shape = sizes.shape
    call = _tuned_call(sizes, inputs, config)
    if not segments.wants_split(sizes.batch, sizes.num_kv_heads, sizes.num_tokens, sizes.context, num_sms):
        return lambda: attention(call, arch), call.out
    scratch = SegmentScratch.of(shape.num_heads, shape.num_kv_heads, sizes.head_size, num_sms, bench.device, segments)
    return lambda: split_attention(call, arch, scratch, num_sms, segments), call.out


def _tuned_call(sizes: Sizes, inputs: Inputs, config: AttentionConfig) -> AttentionCall:
    from executor_svc.gpu.kernels.attention.call import AttentionCall
    from executor_svc.gpu.kernels.attention.config import Phase

    @dataclass(frozen=True)
    class TunedCall(AttentionCall):
        """A call with given tiles."""

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
    """Each attention kernel once, on little data, to fill Triton's cache; several processes share these cases."""
    if tiny:
        return [_warm(TINY, None)]
    short, wide, whole = Sizes(1, 512), Sizes(256, 16), Sizes(1, 256, num_tokens=256)
    decode = [replace(each, fp8=fp8) for each in (wide, short) for fp8 in (False, True)]
    cases = [_warm(replace(each, block_size=size), None) for each in (whole, *decode) for size in BLOCK_SIZES]
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


WARM = Group("warm", "attention kernels compiled", warm_cases, limit_s=60)
TUNE_DECODE = Group("tune-decode", "tiles of decode attention", tune_decode_cases, limit_s=200)
TUNE_PREFILL = Group("tune-prefill", "tiles of prefill attention", tune_prefill_cases, limit_s=200)


_SIZES = (
    Sizes(1, 1024), Sizes(1, 8192), Sizes(1, 32768), Sizes(4, 4096), Sizes(16, 1024), Sizes(16, 8192), Sizes(24, 4096),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Candidate:
    """Tiles and segments of a launch."""

    tile: int
    num_warps: int
    num_stages: int
    segments: Segments

    @property
    def tiles(self) -> AttentionConfig:
        return AttentionConfig(DECODE_ROWS, self.tile, self.num_warps, self.num_stages)

    @property
    def params(self) -> dict[str, int]:
        """What names it."""
        return {
            "tile": self.tile, "warps": self.num_warps, "stages": self.num_stages, "least": self.segments.least_keys,
            "per_sm": self.segments.programs_per_sm, "most": self.segments.most,
        }  # fmt: skip


_MOST = Segments().most
_UNSPLIT = 1
CANDIDATES = tuple(
    Candidate(tile, warps, stages, Segments(least, per_sm, most))
    for tile, warps, stages, least, per_sm, most in (
        # The tiles of 16-bit caches: first with the segments and programs of a launch by default.
        (64, 4, 3, 128, 2, _MOST),
        (64, 4, 3, 64, 2, _MOST),
        (64, 4, 3, 256, 2, _MOST),
        (64, 4, 3, 128, 2, 16),
        (64, 4, 3, 128, 3, _MOST),
        (64, 4, 3, 128, 4, _MOST),
        (64, 4, 4, 128, 2, _MOST),
        (64, 4, 4, 128, 2, 16),
        (64, 4, 4, 128, 2, _UNSPLIT),
        # Other tiles, with as many programs as an SM holds.
        (64, 8, 4, 128, 2, _MOST),
        (64, 2, 4, 128, 2, _MOST),
        (32, 4, 4, 128, 3, _MOST),
        (32, 4, 3, 128, 4, _MOST),
        (32, 2, 4, 128, 3, _MOST),
        (128, 8, 2, 256, 2, _MOST),
        (128, 4, 2, 128, 2, _MOST),
    )
)
FP8_CANDIDATES = tuple(
    Candidate(tile, warps, stages, Segments(128, per_sm))
    for tile, warps, stages, per_sm in (
        (32, 2, 4, 4), (32, 2, 4, 2), (64, 2, 3, 4), (64, 2, 3, 2), (64, 4, 3, 4), (64, 4, 3, 2), (64, 4, 4, 2),
    )
)  # fmt: skip


def segment_cases(tiny: bool) -> Sequence[Case]:
    """Each candidate on a few batches, bf16 and fp8."""
    if tiny:
        return [
            _segment_case(replace(TINY, context=300), Candidate(32, 4, 2, Segments(64, 2, most)))
            for most in (_UNSPLIT, 4)
        ]
    found = [_segment_case(sizes, each) for sizes, each in product(_SIZES, CANDIDATES)]
    return found + [_segment_case(replace(sizes, fp8=True), each) for sizes, each in product(_SIZES, FP8_CANDIDATES)]


def _segment_case(sizes: Sizes, candidate: Candidate) -> Case:
    kv = "fp8" if sizes.fp8 else "bf16"
    params = {"batch": sizes.batch, "context": sizes.context, "kv": kv, "gqa": sizes.group, **candidate.params}
    name = f"{kv} {sizes.batch} x {sizes.context}: " + " ".join(
        f"{key} {value}" for key, value in candidate.params.items()
    )
    return Case(name, params, lambda bench: _time_segments(bench, sizes, candidate), 0.5)


def _time_segments(bench: Bench, sizes: Sizes, candidate: Candidate) -> Metrics:
    """Times, then checks: counters that a launch leaves behind would be wrong in the next."""
    inputs = make_inputs(bench, sizes)
    work, out = tuned_launch(bench, sizes, inputs, candidate.tiles, candidate.segments)
    seconds = bench.clock.seconds(work)
    check(inputs, sizes, out)
    return bandwidth(bench, sizes.kv_bytes, seconds)


def warm_segment_cases(tiny: bool) -> Sequence[Case]:
    """Each candidate's kernels once, on little data, to fill Triton's cache."""
    if tiny:
        return [_warm_segments(TINY, Candidate(32, 4, 2, Segments(64, 2, 4)))]
    found: dict[object, Case] = {}
    for fp8, candidates in ((False, CANDIDATES), (True, FP8_CANDIDATES)):
        for each in candidates:
            split = each.segments.most != _UNSPLIT
            found.setdefault((fp8, each.tiles, split), _warm_segments(Sizes(1, 1024, fp8=fp8), each))
    return list(found.values())


def _warm_segments(sizes: Sizes, candidate: Candidate) -> Case:
    return Case(f"{sizes} {candidate}", {}, lambda bench: _compile_segments(bench, sizes, candidate), 10.0)


def _compile_segments(bench: Bench, sizes: Sizes, candidate: Candidate) -> Metrics:
    work, _ = tuned_launch(bench, sizes, make_inputs(bench, sizes), candidate.tiles, candidate.segments)
    work()
    if bench.device.type == "cuda":
        torch.cuda.synchronize()
    return {}


WARM_SEGMENTS = Group("warm-split", "candidates of split attention compiled", warm_segment_cases, limit_s=45)
TUNE_SEGMENTS = Group("tune-split", "segments of decode attention", segment_cases, limit_s=45)
