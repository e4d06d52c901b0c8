"""Candidates for how decode attention of few sequences shares their keys among programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from benchmarks.gpu.cases import Bench, Case, Group, Metrics
from benchmarks.gpu.kernels.attention import TINY, bandwidth
from benchmarks.gpu.kernels.attention_launch import Sizes, check, make_inputs
from benchmarks.gpu.kernels.attention_tiles import tuned_launch
from executor_svc.gpu.kernels.attention.config import DECODE_ROWS, AttentionConfig
from executor_svc.gpu.kernels.attention.segments import Segments

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


def cases(tiny: bool) -> Sequence[Case]:
    """Each candidate on a few batches, bf16 and fp8."""
    if tiny:
        return [_case(replace(TINY, context=300), Candidate(32, 4, 2, Segments(64, 2, most))) for most in (_UNSPLIT, 4)]
    found = [_case(sizes, each) for sizes, each in product(_SIZES, CANDIDATES)]
    return found + [_case(replace(sizes, fp8=True), each) for sizes, each in product(_SIZES, FP8_CANDIDATES)]


def _case(sizes: Sizes, candidate: Candidate) -> Case:
    kv = "fp8" if sizes.fp8 else "bf16"
    params = {"batch": sizes.batch, "context": sizes.context, "kv": kv, "gqa": sizes.group, **candidate.params}
    name = f"{kv} {sizes.batch} x {sizes.context}: " + " ".join(
        f"{key} {value}" for key, value in candidate.params.items()
    )
    return Case(name, params, lambda bench: _time(bench, sizes, candidate), 0.5)


def _time(bench: Bench, sizes: Sizes, candidate: Candidate) -> Metrics:
    """Times, then checks: counters that a launch leaves behind would be wrong in the next."""
    inputs = make_inputs(bench, sizes)
    work, out = tuned_launch(bench, sizes, inputs, candidate.tiles, candidate.segments)
    seconds = bench.clock.seconds(work)
    check(inputs, sizes, out)
    return bandwidth(bench, sizes.kv_bytes, seconds)


def warm_cases(tiny: bool) -> Sequence[Case]:
    """Each candidate's kernels once, on little data, to fill Triton's cache."""
    if tiny:
        return [_warm(TINY, Candidate(32, 4, 2, Segments(64, 2, 4)))]
    found: dict[object, Case] = {}
    for fp8, candidates in ((False, CANDIDATES), (True, FP8_CANDIDATES)):
        for each in candidates:
            split = each.segments.most != _UNSPLIT
            found.setdefault((fp8, each.tiles, split), _warm(Sizes(1, 1024, fp8=fp8), each))
    return list(found.values())


def _warm(sizes: Sizes, candidate: Candidate) -> Case:
    return Case(f"{sizes} {candidate}", {}, lambda bench: _compile(bench, sizes, candidate), 10.0)


def _compile(bench: Bench, sizes: Sizes, candidate: Candidate) -> Metrics:
    work, _ = tuned_launch(bench, sizes, make_inputs(bench, sizes), candidate.tiles, candidate.segments)
    work()
    if bench.device.type == "cuda":
        torch.cuda.synchronize()
    return {}


WARM = Group("warm-split", "candidates of split attention compiled", warm_cases, limit_s=45)
GROUP = Group("tune-split", "segments of decode attention", cases, limit_s=45)
