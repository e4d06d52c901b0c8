"""Linear layers with weights in 8 bits, or in few bits, beside cuBLAS in bf16: matrices of an 8B model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.gpu.cases import Bench, Case, Group, Metrics

if TYPE_CHECKING:
    from executor_svc.device.stored_linear import QuantBlock, QuantFormat
    from executor_svc.gpu.choices.few_bits import FewBitsWay
    from executor_svc.gpu.linear import Quantization

_LAYERS = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
_TINY_LAYERS = {"qkv": (64, 96)}
_LARGEST_ERROR = {"int8": 0.02, "fp8": 0.05, "fp8_w8a8": 0.08}
"""Relative error of a row beside bf16 weights, by L2 norm."""


def cases(tiny: bool) -> Sequence[Case]:
    """Every quantization, by rows and layer."""
    layers, counts = (_TINY_LAYERS, (3,)) if tiny else (_LAYERS, (1, 16, 64, 256))
    kinds: tuple[Quantization, ...] = ("int8", "fp8") if tiny else ("int8", "fp8", "fp8_w8a8")
    return [_case(kind, layer, *layers[layer], rows) for rows in counts for kind in kinds for layer in layers]


def _case(kind: Quantization, layer: str, in_features: int, out_features: int, rows: int) -> Case:
    params = {
        "weights": kind, "layer": layer, "rows": rows, "in_features": in_features, "out_features": out_features,
    }  # fmt: skip
    name = f"{kind} {layer} {in_features} to {out_features}, {rows} rows"
    return Case(name, params, lambda bench: _time(bench, kind, in_features, out_features, rows), 4.0)


def _time(bench: Bench, kind: Quantization, in_features: int, out_features: int, rows: int) -> Metrics:
    from executor_svc.gpu.linear import SumsWorkspace, make_linear

    weight = (torch.randn(out_features, in_features, device=bench.device) * 0.02).to(torch.bfloat16)
    x = torch.randn(rows, in_features, device=bench.device).to(torch.bfloat16)
    workspace = SumsWorkspace(bench.device)
    plain = make_linear(weight, None, "none", workspace)
    narrow = make_linear(weight, None, kind, workspace)
    outs = [torch.empty(rows, out_features, dtype=torch.bfloat16, device=bench.device) for _ in range(2)]
    expected, found = (each(x, out).float() for each, out in zip((plain, narrow), outs, strict=True))
    error = float((found - expected).norm() / expected.norm())
    if not error < _LARGEST_ERROR[kind]:
        raise RuntimeError(f"{kind} is wrong: relative error {error:.3g} beside bf16 weights")
    seconds, plain_s = (
        bench.clock.seconds(lambda each=each, out=out: each(x, out))  # type: ignore[misc]
        for each, out in zip((narrow, plain), outs, strict=True)
    )
    return {
        "us": 1e6 * seconds,
        "bf16_us": 1e6 * plain_s,
        "speedup": plain_s / seconds,
        "percent_of_copy": 100 * weight.numel() / seconds / bench.ceilings.copy,
        "bf16_percent_of_copy": 100 * 2 * weight.numel() / plain_s / bench.ceilings.copy,
    }


GROUP = Group("linears", "linear layers with 8-bit weights beside bf16", cases, limit_s=60)


_TINY_FEW_BITS_LAYERS = {"qkv": (256, 96)}
_KINDS = ("Q4_K", "Q6_K", "Q4_0", "gptq", "Q8_0", "fp8")
_LARGEST_FEW_BITS_ERROR = 0.01
"""Relative error of a row beside the same weights in bf16, by L2 norm: both results are rounded to bf16."""


def few_bits_cases(tiny: bool) -> Sequence[Case]:
    """Every format, by rows and layer: those numbers of rows first that have several ways."""
    layers, counts = (_TINY_FEW_BITS_LAYERS, (3, 17)) if tiny else (_LAYERS, (64, 256, 128, 192, 32, 17, 16, 1, 2048))
    return [_few_bits_case(kind, layer, *layers[layer], rows) for rows in counts for kind in _KINDS for layer in layers]


def _few_bits_case(kind: str, layer: str, in_features: int, out_features: int, rows: int) -> Case:
    params = {
        "weights": kind, "layer": layer, "rows": rows, "in_features": in_features, "out_features": out_features,
    }  # fmt: skip
    name = f"{kind} {layer} {in_features} to {out_features}, {rows} rows"
    return Case(name, params, lambda bench: _time_few_bits(bench, kind, in_features, out_features, rows), 5.0)


def _time_few_bits(bench: Bench, name: str, in_features: int, out_features: int, rows: int) -> Metrics:
    from executor_svc.device.dequantize import dequantize
    from executor_svc.gpu.choices.few_bits import FewBitsChoices, FewBitsWays
    from executor_svc.gpu.kernels.few_bits.layout import FewBitsWeight
    from executor_svc.gpu.linear import SumsWorkspace, multiprocessors
    from executor_svc.gpu.stored_linear import PackedRows

    kind = format_of(name)
    block = random_block(kind, out_features, in_features, bench.device)
    weight = FewBitsWeight(kind, out_features, in_features, bench.device)
    weight.write(0, block)
    wide = dequantize(block, kind).to(torch.bfloat16)
    num_sms, workspace = multiprocessors(bench.device), SumsWorkspace(bench.device)
    choices = FewBitsChoices(workspace, _arch(bench.device), num_sms)
    measured = choices.ways_of(name, weight, torch.bfloat16)
    packed = PackedRows.of(weight, None, None, workspace, num_sms, ways=measured)

    def by(way: FewBitsWay) -> Callable[[Tensor, Tensor], None]:
        return lambda x, out: packed.product.write(way, x, out)

    def plain(x: Tensor, out: Tensor) -> None:
        torch.mm(x, wide.t(), out=out)

    x = torch.randn(rows, in_features, device=bench.device).to(torch.bfloat16)
    found, expected = (torch.empty(rows, out_features, dtype=torch.bfloat16, device=bench.device) for _ in range(2))
    plain(x, expected)
    plain_s, usual, times = bench.clock.seconds(lambda: plain(x, expected)), FewBitsWays().of(rows), Metrics()
    for way in choices.ways_for(rows):
        by(way)(x, found)
        _check(f"{name} by {way}", found, expected)
        seconds = bench.clock.seconds(lambda way=way: by(way)(x, found))  # type: ignore[misc]
        times[f"{way.replace(' ', '_')}_us"] = 1e6 * seconds
    seconds = 1e-6 * times[f"{usual}_us"]
    return {
        "us": 1e6 * seconds,
        "bf16_us": 1e6 * plain_s,
        "speedup": plain_s / seconds,
        "best_speedup": 1e6 * plain_s / min(times.values()),
        **times,
        "percent_of_copy": 100 * weight.num_bytes / seconds / bench.ceilings.copy,
        "bf16_percent_of_copy": 100 * wide.nbytes / plain_s / bench.ceilings.copy,
        "tflop_per_s": 2e-12 * rows * in_features * out_features / seconds,
    }


def _arch(device: torch.device) -> int:
    """Compute capability, such as 90; of the GPU that the interpreter simulates, without one."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _check(name: str, found: Tensor, expected: Tensor) -> None:
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    if not error < _LARGEST_FEW_BITS_ERROR:
        raise RuntimeError(f"{name} is wrong: relative error {error:.3g} beside the same weights in bf16")


def format_of(name: str) -> QuantFormat:
    """Return a common format by its name."""
    from executor_svc.device.stored_linear import QuantFormat

    return {
        "Q4_K": QuantFormat("Q4_K", 4, 32, super_group=256, offsets="minimum"),
        "Q6_K": QuantFormat("Q6_K", 6, 16, zero=32, super_group=256),
        "Q4_0": QuantFormat("Q4_0", 4, 32, zero=8),
        "Q8_0": QuantFormat("Q8_0", 8, 32, zero=128),
        "gptq": QuantFormat("gptq", 4, 128, offsets="zero_point"),
        "fp8": QuantFormat("fp8", 8, 128, values="e4m3", scale="float32"),
        "mxfp4": QuantFormat("mxfp4", 4, 32, values="e2m1", scale="e8m0"),
    }[name]


def random_block(kind: QuantFormat, rows: int, columns: int, device: torch.device) -> QuantBlock:
    """Return random numbers of a weight [rows, columns], on the device."""
    from executor_svc.device.stored_linear import QuantBlock

    def integers(low: int, high: int, count: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, (rows, count), device=device).to(dtype)

    def numbers(count: int) -> Tensor:
        if kind.scale == "e8m0":
            return integers(117, 122, count, torch.uint8)
        return (torch.rand(rows, count, device=device) * 0.01).to(getattr(torch, kind.scale))

    codes = integers(0, 2**kind.bits, columns, torch.uint8)
    if kind.values == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    groups, minimum = columns // kind.group, kind.offsets == "minimum"
    if kind.super_group is not None:
        supers = columns // kind.super_group
        return QuantBlock(
            codes,
            integers(0, 64, groups, torch.int8),
            super_scales=numbers(supers),
            minimums=integers(0, 64, groups, torch.int8) if minimum else None,
            super_minimums=-numbers(supers) if minimum else None,
        )
    zeros = integers(0, 2**kind.bits, groups, torch.uint8) if kind.offsets == "zero_point" else None
    return QuantBlock(codes, numbers(groups), zero_points=zeros)


FEW_BITS = Group("few-bits", "linear layers with weights in few bits beside bf16", few_bits_cases, limit_s=240)
