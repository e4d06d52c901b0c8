"""Linears in few bits against float64, and same row, same bits: every format, dtype and level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.linear import CpuLinear
from executor_svc.cpu.kernels.matmul_tiles import has_pairs
from executor_svc.cpu.kernels.quantized.launches import DensePart
from executor_svc.cpu.stored_linear import CpuStoredLinear, StoredEmbedding, has_kernel
from executor_svc.device.dequantize import dequantize
from executor_svc.device.kernels import WeightRows
from executor_svc.device.stored_linear import QuantFormat, QuantRows, StoredLinear
from tests.executor_svc.cpu.kernels.bits import equal_bits
from tests.executor_svc.cpu.kernels.processors import ISAS
from tests.executor_svc.cpu.kernels.quantized.formats import (
    FORMATS,
    INT8_ROWS,
    Q4_0,
    Q4_K,
    Q6_K,
    Q8_0,
    format_of,
    random_block,
)
from tests.executor_svc.cpu.kernels.quantized.formats_in_memory import BlockRows
from tests.helpers.marks import short_and_long

F32, BF16 = torch.float32, torch.bfloat16
OUT = 75
_OTHERS_ON_AVX512 = {"Q4_0", "Q5_1", "mxfp4", "Q2_K", "Q3_K", "IQ4_NL"}
"""Formats whose codes become numbers by a permutation there."""
SHORT: dict[str, tuple[str, ...]] = {
    "avx2": ("Q4_0", "Q4_K", "Q6_K", "Q8_0", "Q3_K", "IQ4_NL", "gptq 4", "mxfp4", INT8_ROWS),
    "avx512": ("Q5_1",),
    "avx512-bf16": (
        *("Q4_0", "Q4_K", "Q6_K", "Q2_K", "Q3_K", "IQ2_S", "gptq 8", "int4 by 16", "fp8 blocks", "mxfp4", "int4 rows"),
    ),
}
"""Formats by level in `make test`, where all of these levels are: each once, and each kind of code on both widths."""
ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 48, 49, 96, 97)
"""All tiles of few rows and of many, and more than one item's."""


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# The other levels run the kernels of one of these: what they add is for bfloat16 and int8 only.
LEVELS = [name for name in ISAS if name in {"avx2", "avx512", "avx512-bf16", "native"}]


@pytest.fixture(scope="module", params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(isa=ISAS[request.param])


def cases() -> list[Any]:
    """Return levels and formats for `parametrize`. Some formats have the code of others."""
    names = [name for name in FORMATS if name not in {"Q4_1", "Q5_0", "Q5_K", "fp8 rows"}]
    # The source of other formats is that of avx2.
    found = [(isa, name) for isa in LEVELS for name in names if isa != "avx512" or name in _OTHERS_ON_AVX512]
    short = SHORT if SHORT.keys() <= set(LEVELS) else dict.fromkeys(LEVELS, names)
    return short_and_long(found, [(isa, name) for isa, name in found if name in short[isa]])


without_avx512 = pytest.mark.parametrize(
    "kernels", short_and_long(LEVELS, [name for name in LEVELS if name != "avx512"]), indirect=True
)


@pytest.fixture
def dtype(kernels: CpuKernels) -> torch.dtype:
    """Rows of bfloat16 become floats before all else, where there is no dot product of pairs."""
    return BF16 if has_pairs(kernels.isa, "bfloat16") else F32


def made(
    kernels: CpuKernels, dtype: torch.dtype, *parts: QuantRows | WeightRows, bias: Tensor | None = None
) -> CpuStoredLinear:
    linear = CpuStoredLinear("test", StoredLinear(parts, dtype), bias, kernels)
    linear.read()
    return linear


def check(found: Tensor, x: Tensor, weight: Tensor, magnitudes: Tensor, bias: Tensor | None = None) -> None:
    """Compare with float64, within the bound of a chain of K + 2 roundings of numbers as large as magnitudes.

    magnitudes: |value * scale| + |minimum|, at most by which sums can be larger than with the weight's numbers.
    """
    wide, columns = x.double(), weight.double().t()
    added = torch.zeros(1).double() if bias is None else bias.double()
    expected = wide @ columns + added
    sizes = wide.abs() @ magnitudes.double().t() + added.abs()
    bound = (x.shape[1] + 4) * 2**-23 * sizes + (2**-8 * expected.abs() if x.dtype == BF16 else 0.0) + 1e-30
    assert found.shape == expected.shape
    assert ((found.double() - expected).abs() / bound).max() <= 1.0


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("kernels", "name"), cases(), indirect=["kernels"])
def test_products(kernels: CpuKernels, dtype: torch.dtype, name: str) -> None:
    inner = 70 if "rows" in name else 768
    kind = format_of(name, inner)
    block = random_block(kind, OUT, inner, 5)
    linear = made(kernels, dtype, BlockRows(kind, block))
    x = randn(6, ROWS[-1], inner).to(dtype)
    found = linear(x, F32)
    weight = dequantize(block, kind)
    minimum = torch.zeros(1) if block.minimums is None else dequantize(block, kind).abs().amax()
    check(found, x, weight, weight.abs() + 2 * minimum)
    for count in ROWS:
        first = ROWS[-1] - count
        assert equal_bits(linear(x[first:].contiguous(), F32), found[first:])


@pytest.mark.sampled(1)
def test_every_number_of_rows_has_the_same_bits(kernels: CpuKernels, dtype: torch.dtype) -> None:
    for kind in (Q4_K, Q6_K):
        linear = made(kernels, dtype, BlockRows(kind, random_block(kind, 32, 512, 7)))
        x = randn(8, 97, 512).to(dtype)
        found = linear(x, F32)
        for count in range(1, 97):
            assert equal_bits(linear(x[:count], F32), found[:count])
    assert equal_bits(linear(x), found.to(dtype))


class Dense:
    """Implements `device.kernels.WeightRows`."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.shape, self.dtype = weight, tuple(weight.shape), weight.dtype

    def blocks(self, num_bytes: int, multiple: int) -> object:
        yield self.weight

    def whole(self) -> Tensor:
        return self.weight


@pytest.mark.sampled(1)
@without_avx512
def test_parts_with_orders_of_columns_and_a_bias(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """Formats mixed in one fused projection, a dense part among them; two have other orders of columns."""
    inner = 256
    orders = [None, torch.randperm(inner, generator=torch.Generator().manual_seed(1)), None]
    orders[2] = orders[1].flip(0) if orders[1] is not None else None
    kinds = (Q4_K, Q8_0, QuantFormat("with minimums", 4, 32, offsets="minimum"))
    blocks = [random_block(kind, rows, inner, 9) for kind, rows in zip(kinds, (33, 64, 7), strict=True)]
    parts: list[QuantRows | WeightRows] = [
        BlockRows(kind, block, order) for kind, block, order in zip(kinds, blocks, orders, strict=True)
    ]
    weights = [dequantize(block, kind) for kind, block in zip(kinds, blocks, strict=True)]
    weights = [
        weight if order is None else weight[:, order.argsort()] for weight, order in zip(weights, orders, strict=True)
    ]
    dense = (randn(10, 21, inner) / 100).to(dtype)
    parts.insert(1, Dense(dense))  # type: ignore[arg-type]
    weights.insert(1, dense.float())
    bias = randn(11, 125).to(dtype)
    linear = made(kernels, dtype, *parts, bias=bias)
    assert (linear.out_features, linear.in_features) == (125, inner)
    weight = torch.cat(weights)
    for rows in (1, 19):
        x = randn(12, rows, inner).to(dtype)
        check(linear(x), x, weight, weight.abs() + 3 * weight.abs().amax(), bias)
    alone = CpuLinear(dense, bias[33:54], kernels)
    assert equal_bits(linear(x)[:, 33:54], alone(x))


@pytest.mark.sampled(2)
@without_avx512
@pytest.mark.parametrize("name", ["Q4_K", INT8_ROWS])
def test_nan_and_infinity_stay_in_their_row(kernels: CpuKernels, name: str) -> None:
    inner = 70 if "rows" in name else 256
    kind = format_of(name, inner)
    block = random_block(kind, 32, inner, 13)
    block.codes[:, 5] = kind.zero + 3  # neither 0, times infinity, nor another sign in some rows of the weight
    linear = made(kernels, BF16, BlockRows(kind, block))
    for rows in (2, 60):
        x = randn(14, rows, inner).bfloat16()
        clean = linear(x)
        x[0, 7], x[1, 5] = float("nan"), float("inf")
        found = linear(x)
        assert found[0].isnan().all()
        assert not found[1].isfinite().any()
        assert equal_bits(found[2:], clean[2:])


def test_one_scale_for_a_row_of_fewer_columns_than_a_step(kernels: CpuKernels, dtype: torch.dtype) -> None:
    kind = format_of(INT8_ROWS, 24)
    block = random_block(kind, OUT, 24, 21)
    x = randn(22, 97, 24).to(dtype)
    weight = dequantize(block, kind)
    check(made(kernels, dtype, BlockRows(kind, block))(x, F32), x, weight, weight.abs())


@pytest.mark.parametrize("kernels", LEVELS[-1:], indirect=True)
def test_recorded_products_know_the_weight_that_follows(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """Packed or dense, with rows of x as they are or in int8; the last one has its own weight."""
    packed = BlockRows(Q8_0, random_block(Q8_0, 64, 64, 23))
    linear = made(kernels, dtype, packed, Dense(randn(24, 32, 64).to(dtype)), packed)  # type: ignore[arg-type]
    int8 = CpuStoredLinear("int8", StoredLinear([packed], dtype), None, kernels, "int8")
    int8.read()
    x = randn(25, 2, 64).to(dtype)
    with kernels.recording() as recording:
        linear(x)
        int8(x)
        linear(x)
    weights = [(each.panels if isinstance(each, DensePart) else each.packed).data_ptr() for each in linear.parts]
    known = [*weights, int8.parts[0].packed.data_ptr(), *weights]
    products = [each for each in recording.launches if each.kernel.startswith(("matmul", "quantized_", "int8_product"))]
    assert [each.arguments[1] for each in products] == known
    assert [each.arguments[-2] for each in products] == [*known[1:], known[-1]]
    recording.program().run(rows=2)


def test_dense_parts_prefetch_memory_of_their_own(kernels: CpuKernels, dtype: torch.dtype) -> None:
    linear = made(kernels, dtype, BlockRows(Q8_0, random_block(Q8_0, 32, 64, 23)), Dense(randn(24, 32, 64).to(dtype)))  # type: ignore[arg-type]
    with kernels.recording() as recording:
        linear(randn(25, 2, 64).to(dtype))
    (dense,) = [launch for launch in recording.launches if launch.kernel.startswith("matmul")]
    assert dense.arguments[-2] == dense.arguments[1]


def test_threads_do_not_change_bits() -> None:
    kind = Q4_K
    rows = BlockRows(kind, random_block(kind, 500, 512, 15))
    one, three = (made(CpuKernels(threads, ISAS[LEVELS[-1]]), BF16, rows) for threads in (1, 3))
    for count in (1, 16, 130):
        x = randn(16, count, 512).bfloat16()
        assert equal_bits(one(x), three(x))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FORMATS)
def test_embedding_rows_are_the_dequantized_numbers(kernels: CpuKernels, dtype: torch.dtype, name: str) -> None:
    if kernels.isa.name.startswith("avx512") and name not in {"Q4_K", "mxfp4"}:
        pytest.skip("the same source as on avx2")
    inner = 70 if "rows" in name else 768
    kind = format_of(name, inner)
    block = random_block(kind, OUT, inner, 17)
    if kind.scale == "e8m0":
        block.scales[0, 0], block.scales[1, 0] = 0, 255
    embedding = StoredEmbedding(made(kernels, dtype, BlockRows(kind, block)), kernels)
    ids = torch.tensor([74, 0, 31, 32, 1, 74])
    expected = dequantize(block, kind).to(dtype)[ids]
    for scale in (1.0, 3.7) if name == "Q4_K" else (1.0,):
        found, wanted = embedding(ids, scale), (expected.float() * scale).to(dtype)
        assert torch.equal(found.isnan(), wanted.isnan())
        assert equal_bits(found.nan_to_num(0.5), wanted.nan_to_num(0.5))


def test_a_format_without_a_kernel_is_dense(kernels: CpuKernels, caplog: pytest.LogCaptureFixture) -> None:
    kind = QuantFormat("odd groups", 4, 48)
    assert not has_kernel(kind, 96, kernels.isa)
    block = random_block(kind, 40, 96, 18)
    linear = made(kernels, F32, BlockRows(kind, block))
    assert "test: no kernel for odd groups" in caplog.text
    x = randn(19, 3, 96)
    assert equal_bits(linear(x), CpuLinear(dequantize(block, kind), None, kernels)(x))


def test_e2m1_needs_a_permutation() -> None:
    other = Isa("other", "generic", frozenset(), "")
    assert not has_kernel(format_of("mxfp4", 64), 64, other)
    assert has_kernel(Q4_0, 64, other)
