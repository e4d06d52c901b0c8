"""Limits of the hardware, measured at the start of each run: bandwidths and the rate of matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.gpu.cases import Bench, Case, Ceilings, Group, Metrics

_BYTES = 4 << 30
_SIDE = 8192
_TINY_BYTES, _TINY_SIDE = 1 << 16, 64


def cases(tiny: bool) -> Sequence[Case]:
    """Copy, read, product."""
    size, side = (_TINY_BYTES, _TINY_SIDE) if tiny else (_BYTES, _SIDE)
    return (
        Case("copy", {"bytes": size}, lambda bench: _copy(bench, size), 5.0),
        Case("read", {"bytes": size}, lambda bench: _read(bench, size), 10.0),
        Case("matmul", {"side": side, "dtype": "bfloat16"}, lambda bench: _matmul(bench, side), 5.0),
    )


def ceilings_of(found: dict[str, Metrics]) -> Ceilings:
    """Limits from the metrics of the cases, by name; the default for a case without metrics."""
    default = Ceilings()
    return Ceilings(
        copy=1e12 * found["copy"]["tb_per_s"] if "copy" in found else default.copy,
        read=1e12 * found["read"]["tb_per_s"] if "read" in found else default.read,
        matmul=1e12 * found["matmul"]["tflop_per_s"] if "matmul" in found else default.matmul,
        measured=len(found) == len(cases(False)),
    )


def _random_words(size: int, device: torch.device) -> torch.Tensor:
    # Small enough that a program's sum fits in 32 bits: the interpreter does not wrap around.
    return torch.randint(-(2**15), 2**15, (size // 4,), dtype=torch.int32, device=device)


def _copy(bench: Bench, size: int) -> Metrics:
    source = _random_words(size, bench.device)
    target = torch.empty_like(source)
    seconds = bench.clock.seconds(lambda: target.copy_(source))
    return {"ms": 1e3 * seconds, "tb_per_s": 2 * size / seconds / 1e12}


def _read(bench: Bench, size: int) -> Metrics:
    """The faster of our kernel and PyTorch's sum."""
    from benchmarks.gpu.kernels.read_kernel import PER_SM, read_all

    words = _random_words(size, bench.device)
    programs = 4
    if bench.device.type == "cuda":
        programs = PER_SM * torch.cuda.get_device_properties(bench.device).multi_processor_count
    sums = torch.empty(programs, dtype=torch.int32, device=bench.device)
    read_all(words, sums)
    if int(sums.sum(dtype=torch.int64)) % 2**32 != int(words.sum(dtype=torch.int64)) % 2**32:
        raise RuntimeError("the kernel read other data than the tensor holds")
    floats, total = words.view(torch.float32), torch.empty((), dtype=torch.float32, device=bench.device)
    ours = bench.clock.seconds(lambda: read_all(words, sums))
    torchs = bench.clock.seconds(lambda: torch.sum(floats, 0, out=total))
    return {
        "ms": 1e3 * min(ours, torchs),
        "tb_per_s": size / min(ours, torchs) / 1e12,
        "kernel_tb_per_s": size / ours / 1e12,
        "sum_tb_per_s": size / torchs / 1e12,
    }


def _matmul(bench: Bench, side: int) -> Metrics:
    # Random: products of zeros are faster than real ones.
    a, b = (torch.randn(side, side, device=bench.device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    seconds = bench.clock.seconds(lambda: torch.mm(a, b, out=out))
    return {"ms": 1e3 * seconds, "tflop_per_s": 2 * side**3 / seconds / 1e12}


GROUP = Group("ceilings", "limits of the hardware", cases, limit_s=30)
