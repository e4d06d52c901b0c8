"""Linear layers with 8-bit weights beside cuBLAS in bf16: matrices of an 8B model, decode batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.cases import Bench, Case, Group, Metrics

if TYPE_CHECKING:
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
    from executor_svc.gpu.linear import Workspace, make_linear

    weight = (torch.randn(out_features, in_features, device=bench.device) * 0.02).to(torch.bfloat16)
    x = torch.randn(rows, in_features, device=bench.device).to(torch.bfloat16)
    workspace = Workspace(bench.device)
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
