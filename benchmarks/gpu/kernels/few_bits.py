"""Linear layers with weights in few bits beside cuBLAS in bf16: matrices of an 8B model, decode batches and prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.gpu.common.cases import Bench, Case, Group, Metrics
from benchmarks.gpu.kernels.linears import LAYERS

if TYPE_CHECKING:
    from executor_svc.device.stored_linear import QuantBlock, QuantFormat

_FORMATS = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "gptq", "fp8")
_TINY_FORMATS, _TINY_LAYERS = ("Q4_0", "fp8"), {"qkv": (256, 96)}
_LARGEST_ERROR = 0.01
"""Relative error of the products beside those of the dequantized weight in bf16, by L2 norm: both round alike."""


def cases(tiny: bool) -> Sequence[Case]:
    """Every format, by rows and layer."""
    layers, counts = (_TINY_LAYERS, (3,)) if tiny else (LAYERS, (1, 16, 64, 512))
    formats = _TINY_FORMATS if tiny else _FORMATS
    return [_case(name, layer, *layers[layer], rows) for rows in counts for name in formats for layer in layers]


def _case(kind: str, layer: str, in_features: int, out_features: int, rows: int) -> Case:
    params = {
        "weights": kind, "layer": layer, "rows": rows, "in_features": in_features, "out_features": out_features,
    }  # fmt: skip
    name = f"few bits {kind} {layer} {in_features} to {out_features}, {rows} rows"
    return Case(name, params, lambda bench: _time(bench, kind, in_features, out_features, rows), 4.0)


def _time(bench: Bench, kind: str, in_features: int, out_features: int, rows: int) -> Metrics:
    from executor_svc.device.dequantize import dequantize
    from executor_svc.gpu.few_bits import PackedLinear
    from executor_svc.gpu.kernels.few_bits.formats import COMMON
    from executor_svc.gpu.kernels.few_bits.packed import pack
    from executor_svc.gpu.linear import Workspace, make_linear

    stored = _RandomRows(COMMON[kind], (out_features, in_features))
    weight = pack([stored], bench.device)
    dense = dequantize(stored.block, stored.format).to(torch.bfloat16).to(bench.device)
    x = torch.randn(rows, in_features, device=bench.device).to(torch.bfloat16)
    workspace = Workspace(bench.device)
    packed, plain = PackedLinear(weight, None, workspace), make_linear(dense, None, "none", workspace)
    outs = [torch.empty(rows, out_features, dtype=torch.bfloat16, device=bench.device) for _ in range(2)]
    found, expected = packed(x, outs[0]).float(), plain(x, outs[1]).float()
    error = float((found - expected).norm() / expected.norm())
    if not error < _LARGEST_ERROR:
        raise RuntimeError(f"{kind} is wrong: relative error {error:.3g} beside dequantized weights")
    seconds = bench.clock.seconds(lambda: packed(x, outs[0]))
    plain_s = bench.clock.seconds(lambda: plain(x, outs[1]))
    return {
        "us": 1e6 * seconds,
        "bf16_us": 1e6 * plain_s,
        "speedup": plain_s / seconds,
        "percent_of_copy": 100 * weight.num_bytes / seconds / bench.ceilings.copy,
    }


class _RandomRows:
    """Implements `device.stored_linear.QuantRows`: one block of random numbers."""

    column_order: Tensor | None = None
    whole_row_activations = False

    def __init__(self, kind: QuantFormat, shape: tuple[int, int]) -> None:
        self.format, self.shape = kind, shape
        self.block = _random_block(kind, *shape)

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[QuantBlock]:
        yield self.block


def _random_block(kind: QuantFormat, rows: int, columns: int) -> QuantBlock:
    from executor_svc.device.stored_linear import QuantBlock

    def integers(high: int, count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.randint(high, (rows, count), dtype=dtype)

    def numbers(count: int) -> Tensor:
        return (torch.rand(rows, count) / 100).to(getattr(torch, kind.scale))

    groups, supers = columns // kind.group, columns // kind.super_group if kind.super_group else 0
    minimum = kind.offsets == "minimum"
    return QuantBlock(
        integers(0x7F if kind.values == "e4m3" else 1 << kind.bits, columns),
        scales=integers(64, groups, torch.int8) if supers else numbers(groups),
        super_scales=numbers(supers) if supers else None,
        minimums=integers(64, groups, torch.int8) if minimum else None,
        super_minimums=-numbers(supers) if minimum else None,
        zero_points=integers(16, groups) if kind.offsets == "zero_point" else None,
    )


GROUP = Group("few-bits", "linear layers with weights in few bits beside bf16", cases, limit_s=90)
