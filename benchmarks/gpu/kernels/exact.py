"""Exact products and attention beside fast ones: what a row's bits hang on, and the times, for the choice of a way.

Products: a row alone beside 4, 16, 64 and 256 rows, to the bit, by our kernels, by cuBLAS as PyTorch calls it, and by
cuBLASLt without a workspace, which it needs to split the inner dimension. All in about a minute:
`kernels --groups exact-products,exact-cublaslt,exact-attention --seconds 120`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.gpu.cases import Bench, Case, Goal, Group, Metrics
from benchmarks.gpu.kernels.attention.attention import TINY, flops
from benchmarks.gpu.kernels.attention.attention_launch import Sizes, exact_kernels_of, kernels_of, launch, make_inputs

if TYPE_CHECKING:
    from executor_svc.gpu.exact.products import ExactProducts

_LAYERS = {
    "8b qkv": (4096, 6144), "8b o": (4096, 4096), "8b gate_up": (4096, 28672), "8b down": (14336, 4096),
    "0.6b qkv": (1024, 4096), "0.6b down": (3072, 1024),
}  # fmt: skip
_TINY_LAYERS = {"qkv": (1100, 96)}
_COUNTS, _TINY_COUNTS = (1, 4, 16, 64, 256, 2048), (1, 70)
_FEW_ROWS = 256
_COMPARED = 8
"""Rows of a batch that are compared with themselves alone."""
DECODE_GOAL, PREFILL_GOAL = Goal("ratio", at_most=1.1), Goal("ratio", at_most=1.25)
_DECODES = (
    Sizes(1, 1024), Sizes(1, 8192), Sizes(1, 32768), Sizes(16, 1024), Sizes(16, 8192), Sizes(64, 4096),
    Sizes(256, 1024),
)  # fmt: skip
_PROMPTS = (Sizes(1, 8192, num_tokens=8192), Sizes(8, 1024, num_tokens=1024), Sizes(1, 32768, num_tokens=2048))


# ---------------------------------------------------------------- products


def product_cases(tiny: bool) -> Sequence[Case]:
    """Our kernels and cuBLAS, by rows and layer."""
    return _cases(tiny, _time_products)


def cublaslt_cases(tiny: bool) -> Sequence[Case]:
    """The same by cuBLASLt without a workspace, in a process of its own."""
    return _cases(tiny, _time_cublaslt)


def _cases(tiny: bool, run: Callable[[Bench, int, int, int], Metrics]) -> list[Case]:
    layers, counts = (_TINY_LAYERS, _TINY_COUNTS) if tiny else (_LAYERS, _COUNTS)
    return [_product_case(run, layer, *layers[layer], rows) for layer in layers for rows in counts]


def _product_case(
    run: Callable[[Bench, int, int, int], Metrics], layer: str, in_features: int, out_features: int, rows: int
) -> Case:
    params = {"layer": layer, "rows": rows, "in_features": in_features, "out_features": out_features}
    goal = DECODE_GOAL if rows <= _FEW_ROWS else PREFILL_GOAL
    name = f"{layer} {in_features} to {out_features}, {rows} rows"
    return Case(name, params, lambda bench: run(bench, in_features, out_features, rows), 1.5, goal)


def _weight_and_rows(bench: Bench, in_features: int, out_features: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(bench.device).manual_seed(in_features + out_features)
    drawn = (torch.randn(size, in_features, generator=generator, device=bench.device) for size in (out_features, rows))
    weight, x = drawn
    return (weight * 0.02).to(torch.bfloat16), x.to(torch.bfloat16)


def _equal_percent(x: Tensor, multiply: Callable[[Tensor], Tensor]) -> float:
    """Return how many of the first and the last rows have the bits that they have alone."""
    whole = multiply(x).clone()
    chosen = sorted({*range(min(_COMPARED, len(x))), *range(max(0, len(x) - _COMPARED), len(x))})
    equal = sum(torch.equal(multiply(x[row : row + 1].clone()), whole[row : row + 1]) for row in chosen)
    return 100 * equal / len(chosen)


def _time_products(bench: Bench, in_features: int, out_features: int, rows: int) -> Metrics:
    weight, x = _weight_and_rows(bench, in_features, out_features, rows)
    products = bench.cached("exact products", lambda: _products(bench))
    linear = products.linear(f"{in_features} to {out_features}", weight, None)
    products.probe(256)
    out = torch.empty(rows, out_features, dtype=torch.bfloat16, device=bench.device)
    expected = torch.mm(x, weight.t())
    error = float((linear(x, out).float() - expected.float()).norm() / expected.float().norm())
    if not error < 0.01:
        raise RuntimeError(f"exact products are wrong: relative error {error:.3g} beside cuBLAS")
    seconds = bench.clock.seconds(lambda: linear(x, out))
    cublas_s = bench.clock.seconds(lambda: torch.mm(x, weight.t(), out=expected))
    return {
        "us": 1e6 * seconds,
        "cublas_us": 1e6 * cublas_s,
        "ratio": seconds / cublas_s,
        "equal_percent": _equal_percent(x, linear),
        "cublas_equal_percent": _equal_percent(x, lambda some: torch.mm(some, weight.t())),
        "tiles": len(linear.tiles.used),
        "percent_of_copy": 100 * weight.nbytes / seconds / bench.ceilings.copy,
        "tflop_per_s": 2e-12 * rows * in_features * out_features / seconds,
    }


def _products(bench: Bench) -> ExactProducts:
    from executor_svc.gpu.exact.products import ExactProducts
    from executor_svc.gpu.linear import SumsWorkspace

    return ExactProducts(SumsWorkspace(bench.device))


def _time_cublaslt(bench: Bench, in_features: int, out_features: int, rows: int) -> Metrics:
    bench.cached("cublaslt", lambda: _choose_cublaslt(bench))
    weight, x = _weight_and_rows(bench, in_features, out_features, rows)
    out = torch.empty(rows, out_features, dtype=torch.bfloat16, device=bench.device)
    seconds = bench.clock.seconds(lambda: torch.mm(x, weight.t(), out=out))
    equal = _equal_percent(x, lambda some: torch.mm(some, weight.t()))
    return {"us": 1e6 * seconds, "equal_percent": equal}


def _choose_cublaslt(bench: Bench) -> bool:
    """Before any product of this process: PyTorch reads the variables once."""
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "0"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    if bench.device.type == "cuda":
        torch.backends.cuda.preferred_blas_library("cublaslt")
    return True


# ---------------------------------------------------------------- attention


def attention_cases(tiny: bool) -> Sequence[Case]:
    """Decodes, then prompts, in bf16 with 4 query heads for each of 8 KV heads."""
    if tiny:
        sizes = [TINY, replace(TINY, batch=1, num_tokens=40)]
        return [_attention_case(each, DECODE_GOAL) for each in sizes]
    found = [_attention_case(each, DECODE_GOAL) for each in _DECODES]
    return found + [_attention_case(each, PREFILL_GOAL) for each in _PROMPTS]


def _attention_case(sizes: Sizes, goal: Goal) -> Case:
    params = {
        "batch": sizes.batch, "context": sizes.context, "num_tokens": sizes.num_tokens, "gqa": sizes.group,
        "kv_heads": sizes.num_kv_heads, "head_size": sizes.head_size, "block_size": sizes.block_size,
    }  # fmt: skip
    name = f"{sizes.batch} x {sizes.num_tokens} tokens of {sizes.context}"
    return Case(name, params, lambda bench: _time_attention(bench, sizes), 4.0, goal)


def _time_attention(bench: Bench, sizes: Sizes) -> Metrics:
    seconds, outs = [], []
    make_inputs(bench, sizes)  # draws what is kept: from here on the same is drawn twice
    for kernels in (kernels_of(bench), exact_kernels_of(bench)):
        torch.manual_seed(0)
        inputs = make_inputs(bench, sizes, kernels)
        work, out = launch(bench, sizes, inputs, kernels)
        work()
        outs.append(out.float().clone())
        seconds.append(bench.clock.seconds(work))
    fast, exact = outs
    error = float((exact - fast).norm() / fast.norm())
    if not error < 0.02:
        raise RuntimeError(f"exact attention is wrong: relative error {error:.3g} beside fast attention")
    fast_s, exact_s = seconds
    return {
        "us": 1e6 * exact_s,
        "fast_us": 1e6 * fast_s,
        "ratio": exact_s / fast_s,
        "percent_of_copy": 100 * sizes.kv_bytes / exact_s / bench.ceilings.copy,
        "tflop_per_s": flops(sizes) / exact_s / 1e12,
    }


PRODUCTS = Group("exact-products", "exact products beside cuBLAS, rows beside themselves alone", product_cases, 70)
CUBLASLT = Group("exact-cublaslt", "cuBLASLt without a workspace, rows beside themselves alone", cublaslt_cases, 40)
ATTENTION = Group("exact-attention", "exact attention beside fast attention", attention_cases, 50)
