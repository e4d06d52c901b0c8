"""The machine's limits: rates of reading and of multiplying, and the shortest time that some work can take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np

from benchmarks.common.rows import BenchmarkError
from benchmarks.serving.loops import (
    Loop,
    Runner,
    bfloat16_pairs,
    int8_dots,
    int8_pairs,
    multiply_add,
    read_sum,
    tile_products,
)
from benchmarks.serving.step_work import Work
from executor_svc.cpu.kernels.codegen.isa import ISA_NAMES, forced_isa

Bound = Literal["read", "compute"]

NATIVE = "native"
"""The instruction set of a processor without a level."""
_LANES = {"avx2": 8, "avx-vnni": 8, NATIVE: 4}
_VNNI = ("avx-vnni", "avx512-vnni", "avx512-bf16")
_LARGEST_RANGE = 512 * 2**20
_SECONDS = 0.02
_REPEATS = 9
_GEMM = 2048


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates of all threads together, the best of several repeats."""

    read_gb_per_s: float
    """Of a range as large as a step's weights, at most 512 MiB: what fits into the L3 cache is read from there."""
    fp32_gflops: float
    """Fused multiply-adds in the instruction set's registers; each is two operations."""
    bf16_gflops: float
    """Products of bfloat16 that are summed in float32: by AVX512-BF16's dot products, by AMX's tiles where the level
    has them, else the same as fp32."""
    torch_read_gb_per_s: float
    """torch's sum over as large a range."""
    int8_gops: float = 0.0
    """Dot products of bytes that are summed in 32 bits, 2 operations each; 0: not measured."""

    def better(self, other: Limits) -> Limits:
        """The higher rate of two measurements."""
        return Limits(**{each.name: max(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)})

    def bound(self, work: Work) -> tuple[float, Bound]:
        """The least seconds for some work, and which rate bounds it: integer products follow the others."""
        read_s = work.read_bytes / 1e9 / max(self.read_gb_per_s, self.torch_read_gb_per_s)
        compute_s = work.flops / 1e9 / self.bf16_gflops
        if work.int8_ops:
            compute_s += work.int8_ops / 1e9 / self.int8_gops
        return (read_s, "read") if read_s >= compute_s else (compute_s, "compute")

    def metrics(self) -> dict[str, float]:
        """The rates for a row, those that were measured."""
        return {name: rate for name, rate in asdict(self).items() if rate}


def chosen_isa(name: str | None) -> str:
    """The level that kernels use if it is forced to be `name`, or by default; raises BenchmarkError."""
    if name is not None and name not in ISA_NAMES:
        raise BenchmarkError(f"--isa {name}: not among {', '.join(ISA_NAMES)}")
    try:
        found = forced_isa(name).name
    except ValueError as error:
        raise BenchmarkError(f"--isa {name}: {error}") from error
    return found if found in ISA_NAMES else NATIVE


def loops_of(isa: str) -> tuple[Loop, Loop]:
    """The loops that measure float32 and bfloat16 of an instruction set."""
    single = multiply_add(_LANES.get(isa, 16))
    pairs = {"avx512-bf16": bfloat16_pairs(), "amx": tile_products("tdpbf16ps", item_bytes=2)}
    return single, pairs.get(isa, single)


def int8_loop(isa: str, words_in_short: int) -> Loop:
    """The loop that measures dot products of bytes; words_in_short: products whose sum fits 16 bits, for those without
    VNNI; at least one, as where signs are moved."""
    if isa == "amx":
        return tile_products("tdpbssd", item_bytes=1)
    lanes = _LANES.get(isa, 16)
    return int8_dots(lanes) if isa in _VNNI else int8_pairs(lanes, max(1, words_in_short))


class LimitMeter:
    """Measures the limits again and again, some 0.4 s each: on shared hosts the rate of reading changes by a factor of
    two within minutes."""

    def __init__(
        self, isa: str, num_threads: int, range_bytes: int, int8: Loop | None = None, gemm: int = _GEMM
    ) -> None:
        """range_bytes: the weights of a step, in bytes; gemm: width of torch's matrices, multiplied here only.

        int8: the loop of integer products, if the work has any.
        """
        import torch

        torch.set_num_threads(num_threads)
        self._loops, self._int8, self._num_threads = loops_of(isa), int8, num_threads
        self._values = np.ones(min(range_bytes, _LARGEST_RANGE) // 4, np.float32)
        self._whole = torch.from_numpy(self._values)
        gemms = []
        for dtype in (torch.float32, torch.bfloat16):
            left, right = (torch.randn(gemm, gemm).to(dtype) for _ in range(2))
            gemms.append(2 * gemm**3 / _best_s(lambda left=left, right=right: left @ right) / 1e9)  # type: ignore[misc]
        self.gemm_gflops = {"gemm_fp32_gflops": round(gemms[0], 1), "gemm_bf16_gflops": round(gemms[1], 1)}
        """torch's products by the instructions that its library chooses, for comparison."""
        self._last = self.measure()

    def measure(self) -> Limits:
        """The rates now."""
        single, pairs = (_multiply_rate(loop, self._num_threads) for loop in self._loops)
        return Limits(
            read_gb_per_s=_read_rate(self._values, self._num_threads) / 1e9,
            fp32_gflops=single / 1e9,
            bf16_gflops=pairs / 1e9,
            torch_read_gb_per_s=self._values.nbytes / _best_s(self._whole.sum) / 1e9,
            int8_gops=0.0 if self._int8 is None else _multiply_rate(self._int8, self._num_threads) / 1e9,
        )

    def around(self) -> Limits:
        """The higher rates of now and of the last time: those around what ran in between."""
        last, self._last = self._last, self.measure()
        return last.better(self._last)


def _multiply_rate(loop: Loop, num_threads: int) -> float:
    runner, values = Runner(loop), np.zeros(64, np.float32)  # all rows of a tile are its first 64 bytes
    sources = [values.ctypes.data] * num_threads
    trial = 100_000
    turns = int(trial * _SECONDS / (trial * num_threads * loop.per_turn / runner.rate(trial, sources, 3)))
    return runner.rate(max(1, turns), sources, _REPEATS)


def _read_rate(values: Any, num_threads: int) -> float:
    loop = read_sum()
    share = values.nbytes // num_threads // loop.per_turn
    sources = [values.ctypes.data + thread * share * loop.per_turn for thread in range(num_threads)]
    passes = max(1, _LARGEST_RANGE // values.nbytes)
    return Runner(loop).rate(share, sources, _REPEATS, passes)


def _best_s(call: Callable[[], Any]) -> float:
    call()
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
