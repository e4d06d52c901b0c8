"""Linears of the CPU against float64, and same row, same bits: as made for this processor and for lesser ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor_svc.cpu.kernels.codegen.emit import Emitter, Int
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.linear import CpuLinear
from executor_svc.cpu.kernels.matmul_tiles import has_pairs
from executor_svc.cpu.kernels.panel_layout import AHEAD, PANEL, ROWS_AT_ONCE, panel_item
from executor_svc.models.weights.linear_weight import LinearWeight
from tests.executor_svc.cpu.kernels import emitted
from tests.executor_svc.cpu.kernels.bits import equal_bits
from tests.executor_svc.cpu.kernels.processors import ISAS

F32, BF16 = torch.float32, torch.bfloat16
ROWS = [*range(1, 31), ROWS_AT_ONCE - 1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 2 * ROWS_AT_ONCE + 23]
"""All ways in which rows are cut into tiles, and more than one item's."""


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=ISAS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(isa=ISAS[request.param])


def check(linear: CpuLinear, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    """Compare with float64, within the bound of a chain of K roundings."""
    found = linear(x, out_dtype)
    assert found.dtype == out_dtype
    wide, columns = x.double(), weight.double().t()
    expected = wide @ columns + (0.0 if bias is None else bias.double())
    sizes = wide.abs() @ columns.abs() + (0.0 if bias is None else bias.double().abs())
    bound = (x.shape[1] + 2) * 2**-23 * sizes + (2**-8 * expected.abs() if x.dtype == BF16 else 0.0) + 1e-30
    assert found.shape == expected.shape
    worst = ((found.double() - expected).abs() / bound).max()
    assert worst <= 1.0


@pytest.mark.sampled(3)
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    rows=st.sampled_from(ROWS),
    inner=st.one_of(st.integers(1, 9), st.integers(60, 130)),
    outer=st.one_of(st.integers(1, 5), st.integers(PANEL - 2, 2 * PANEL + 2), st.integers(80, 200)),
    dtype=st.sampled_from([F32, BF16]),
    wide_out=st.booleans(),
    with_bias=st.booleans(),
)
def test_linear(
    kernels: CpuKernels,
    seed: int,
    rows: int,
    inner: int,
    outer: int,
    dtype: torch.dtype,
    wide_out: bool,
    with_bias: bool,
) -> None:
    x, weight = randn(seed, rows, inner).to(dtype), randn(seed + 1, outer, inner).to(dtype)
    bias = randn(seed + 2, outer).to(dtype) if with_bias else None
    check(CpuLinear(weight, bias, kernels), x, weight, bias, F32 if wide_out else dtype)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(1, 1), (33, 7), (100, 65), (64, 576), (131, 1001)])
def test_rows_of_every_number_have_the_same_bits(
    kernels: CpuKernels, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """And as many rows as there are: nothing beyond them is read or written."""
    weight, bias = randn(0, *shape).to(dtype), randn(1, shape[0]).to(dtype)
    linear = CpuLinear(weight, bias, kernels)
    x = randn(2, 300, shape[1]).to(dtype)
    whole = linear(x)
    check(linear, x, weight, bias, dtype)
    rng = random.Random(3)
    for rows in ROWS:
        start = rng.randrange(300 - rows)
        assert equal_bits(linear(x[start : start + rows]), whole[start : start + rows]), rows
    order = torch.randperm(300, generator=torch.Generator().manual_seed(4))
    assert equal_bits(linear(x[order].contiguous()), whole[order])


@dataclass
class Blocks:
    """A stored weight that is a tensor."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def blocks(self, rows: int) -> Iterator[Tensor]:
        yield from self.tensor.split(rows)

    def whole(self) -> Tensor:
        return self.tensor


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(33, 7), (100, 65), (64, 576)])
def test_weights_in_bf16_of_a_model_in_fp32(kernels: CpuKernels, shape: tuple[int, int], with_bias: bool) -> None:
    """Rows are rounded to bf16 where the level multiplies that; results and biases are not."""
    weight, x = randn(0, *shape).to(BF16).float(), randn(2, 70, shape[1])
    bias = randn(1, shape[0]) if with_bias else None
    kernels.matrix_dtype = BF16
    stored = LinearWeight([Blocks(weight)], F32)
    linear = CpuLinear(stored, bias, kernels)
    linear.read(stored)
    kernels.matrix_dtype = None
    assert linear.panels.dtype == BF16
    given = x.to(BF16).float() if has_pairs(kernels.isa, "bfloat16") else x
    check(linear, given, weight, bias, F32)
    assert equal_bits(linear(x), linear(given))
    assert all(equal_bits(linear(x[first : first + 3]), linear(x)[first : first + 3]) for first in (0, 30, 67))


def test_columns_have_the_bits_of_their_own_rows_of_the_weight(kernels: CpuKernels) -> None:
    """Cut at places that are no borders of panels: a model's fused linears have the bits of the parts."""
    for dtype in (F32, BF16):
        weight, x = randn(0, 150, 77).to(dtype), randn(1, 13, 77).to(dtype)
        whole = CpuLinear(weight, None, kernels)(x)
        parts = [CpuLinear(part, None, kernels)(x) for part in weight.split([1, 47, 33, 69])]
        assert equal_bits(torch.cat(parts, 1), whole)


def test_every_element_is_one_chain_in_ascending_order(kernels: CpuKernels) -> None:
    """Products of such factors have no rounding, so sums one after the other in numpy have the bits of fused steps."""
    x, weight = randn(0, 7, 501).to(BF16).float(), randn(1, 40, 501).to(BF16).float()
    expected = np.zeros((7, 40), np.float32)
    for k in range(501):
        expected = expected + x[:, k, None].numpy() * weight[None, :, k].numpy()
    assert not np.array_equal(expected, (x.double() @ weight.double().t()).float().numpy())
    assert equal_bits(CpuLinear(weight, None, kernels)(x), torch.from_numpy(expected))
    if not kernels.isa.has("avx512bf16"):
        narrow = CpuLinear(weight.to(BF16), None, kernels)(x.to(BF16))
        assert equal_bits(narrow, torch.from_numpy(expected).to(BF16))


def test_wide_output_is_the_narrow_one_as_floats(kernels: CpuKernels) -> None:
    """Logits are rounded to the model's dtype, as transformers rounds them."""
    linear = CpuLinear(randn(0, 70, 65).to(BF16), randn(1, 70).to(BF16), kernels)
    x = randn(2, 20, 65).to(BF16)
    assert equal_bits(linear(x, F32), linear(x).float())


def test_numbers_that_are_none_stay_in_their_row(kernels: CpuKernels) -> None:
    for dtype in (F32, BF16):
        linear = CpuLinear(randn(0, 45, 33).to(dtype), None, kernels)
        x = randn(1, 29, 33).to(dtype)
        expected = linear(x)
        x[5, 32], x[11, 0] = float("nan"), float("inf")
        found = linear(x)
        bad = torch.tensor([5, 11])
        assert not bool(found[bad].isfinite().any())
        kept = torch.ones(29, dtype=torch.bool)
        kept[bad] = False
        assert equal_bits(found[kept], expected[kept])


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_do_not_show(num_threads: int) -> None:
    for dtype in (F32, BF16):
        weight, x = randn(0, 333, 100).to(dtype), randn(1, 250, 100).to(dtype)
        expected = CpuLinear(weight, None, CpuKernels(1))(x)
        linear = CpuLinear(weight, None, CpuKernels(num_threads))
        for rows in (250, 1, 97, 12):
            assert equal_bits(linear(x[:rows]), expected[:rows])


def _items(panels: int, rows: int, streams: int) -> np.ndarray:
    """Return panel, first row, and what is prefetched beside a panel at its number times 10,000, for each item."""
    items = panels * -(-rows // ROWS_AT_ONCE)
    found = np.zeros((items, 3), np.int64)

    def body(emit: Emitter, item: Int, _: Int, __: Int, into: Int, given_rows: Int) -> None:
        work = panel_item(item, given_rows, emit.integer(panels * PANEL - 1), emit.integer(streams))
        coming = work.coming(work.panel * 10_000, emit.integer(10_000), emit.integer(5_000_000), emit.integer(700))
        for which, number in enumerate((work.panel, work.first, coming)):
            emit.builder.store(number.value, emit.pointer(into + (item * 3 + which) * 8, number.value.type))

    emitted.run(2, body, items, found.ctypes.data, rows)
    return found


@pytest.mark.parametrize("streams", [1, 2, 3, 16])
@pytest.mark.parametrize("panels", [1, 2, 7, 8])
def test_items_take_each_panel_once_and_streams_go_on_where_they_were(panels: int, streams: int) -> None:
    rows = ROWS_AT_ONCE + 1
    found = _items(panels, rows, streams)
    assert sorted(map(tuple, found[:, :2])) == [(panel, first) for panel in range(panels) for first in (0, 96)]
    if streams == 1:
        assert found[:, 0].tolist() == [*range(panels)] * 2
    for start in range(streams):  # of the first rows: what a thread takes that always comes at its turn
        own = found[:panels][start::streams, 0]
        assert own.tolist() == [own[0] + turn for turn in range(len(own))]


def test_the_last_panels_of_streams_prefetch_the_following_weight() -> None:
    """All others prefetch the panel behind, but few rows what lies a page behind."""
    for rows in (1, ROWS_AT_ONCE + 1):
        found = _items(7, rows, 2)
        few = [first > 0 or rows == 1 for first in found[:, 1]]
        places = [at * 10_000 + (AHEAD if is_few else 10_000) for at, is_few in zip(found[:, 0], few, strict=True)]
        assert sorted(found[-2:, 0]) == [2, 6]
        assert found[:, 2].tolist() == [*places[:-2], *(5_000_000 + 700 * (panel > 2) for panel in found[-2:, 0])]


def test_recorded_products_know_the_weight_that_follows() -> None:
    kernels, x = CpuKernels(), randn(0, 3, 40)
    linears = [CpuLinear(randn(seed, 40, 40), None, kernels) for seed in range(3)]
    with kernels.recording() as recording:
        for linear in linears:
            x = kernels.add(linear(x), x)
    known = [launch.arguments[-2] for launch in recording.launches if launch.kernel.startswith("matmul")]
    assert known == [linears[which].panels.data_ptr() for which in (1, 2, 2)]
