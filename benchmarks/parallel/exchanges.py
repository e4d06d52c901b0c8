"""One exchange between ranks: our sums in shared memory, and gloo's all_reduce of the same shape, in turns."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common.rows import BenchmarkError
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.ranks.launches import CpuRanks
from executor_svc.cpu.kernels.ranks.memory import ExchangeMemory, ExchangeSizes
from executor_svc.device.ranks import Share

_ROUNDS = 5
"""Turns of each kind, whose medians count."""
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Exchange:
    """Partial results [rows, hidden] float32 of each rank, summed on all."""

    rows: int
    hidden: int
    times: int
    """How often, in a turn."""


def exchange_times(
    rank: int, size: int, folder: str, seed: int, exchanges: Sequence[Exchange]
) -> list[dict[str, float]]:
    """Return the microseconds of each exchange, ours and gloo's; for `on_processes`.

    folder: a new one, in which the ranks find each other. Raises BenchmarkError if the sums differ.
    """
    torch.set_num_threads(1)
    most = max(each.rows for each in exchanges), max(each.hidden for each in exchanges)
    sizes = ExchangeSizes(size, *most, 1, 1)
    kernels = CpuKernels(1)
    ranks = CpuRanks(
        Share(rank, size), kernels, ExchangeMemory(_shared(Path(folder, "memory"), sizes.num_bytes), sizes)
    )
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = f"file://{Path(folder, 'store')}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    return [_times(each, ranks, kernels, rank, seed) for each in exchanges]


def _times(exchange: Exchange, ranks: CpuRanks, kernels: CpuKernels, rank: int, seed: int) -> dict[str, float]:
    shape = exchange.rows, exchange.hidden
    parts = [
        torch.randn(shape, generator=torch.Generator().manual_seed(seed + each)) for each in range(ranks.share.size)
    ]
    own = parts[rank]
    with kernels.recording() as recording:
        recording.rows = f"rows {shape}"
        summed = ranks.sum_partials(own, None, torch.float32)
        program = recording.program()
    reduced = own.clone()

    def ours() -> None:
        program.run(**{f"rows {shape}": exchange.rows})

    def gloo() -> None:
        dist.all_reduce(reduced)

    ours()
    gloo()
    expected = sum(parts[1:], parts[0])
    for name, found in (("ours", summed), ("gloo", reduced)):
        if not torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
            raise BenchmarkError(f"{name}: a sum of {list(shape)} is wrong")
    reduced.zero_()  # or it would grow from turn to turn
    taken: Mapping[str, list[float]] = {"ours": [], "gloo": []}
    for _ in range(_ROUNDS):
        for name, run in (("ours", ours), ("gloo", gloo)):
            taken[name].append(_timed(run, exchange.times))
    return {name: median(each) for name, each in taken.items()}


def _timed(run: Callable[[], None], times: int) -> float:
    """Return the microseconds of a run, the mean of `times` in a row; the ranks begin together."""
    for _ in range(_WARM_UP):
        run()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - began) / times * 1e6


def _shared(path: Path, num_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return memory that all ranks share, zeros at first: whoever comes first makes it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, num_bytes)
    return np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
