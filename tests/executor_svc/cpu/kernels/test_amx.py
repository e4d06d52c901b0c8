"""Products through tiles (AMX): the kernel's own code on tile instructions in numpy, and on the processor's own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_svc.cpu.kernels import cpu_kernels
from executor_svc.cpu.kernels.amx.row_tiles import GROUP, padded, row_tiles
from executor_svc.cpu.kernels.codegen.team import KernelLaunch
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.linear import CpuLinear
from executor_svc.cpu.kernels.panel_layout import ROWS_AT_ONCE
from tests.executor_svc.cpu.kernels.bits import equal_bits
from tests.executor_svc.cpu.kernels.emulated_tiles import EmulatedCode, Tiles
from tests.executor_svc.cpu.kernels.instructions import Bits, Floats, tile_product
from tests.executor_svc.cpu.kernels.processors import ISAS

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(1, 1), (33, 7), (40, 32), (45, 77), (64, 96), (31, 63)]
"""Columns and inner sizes: whole and partial panels, whole and partial tile products, odd inner sizes."""
BLOCKS = [(110, 450, 70), (210, 330, 33), (40, 33, 1300), (33, 70, 640), (400, 33, 651)]
"""Rows, columns, inner sizes: blocks of several panels, of several times ROWS_AT_ONCE rows, and chunks, the last of
which is shorter, or ends with a part of a step."""


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def amid_nan(x: Tensor) -> Tensor:
    """Return the same rows, contiguous, with NaN before and behind them in memory."""
    memory = torch.full((x.numel() + 256,), float("nan"), dtype=x.dtype)
    memory[128:-128] = x.flatten()
    return memory[128:-128].view(x.shape)


def bits_of(x: Tensor) -> Bits:
    return x.contiguous().view(torch.int16).numpy().view(np.uint16)


def expected_sums(x: Tensor, weight: Tensor) -> Floats:
    """Return x @ weight.T by tile products of 32 numbers, ascending, the last filled up with zeros."""
    padding = -x.shape[1] % 32
    left, right = (bits_of(torch.nn.functional.pad(each, (0, padding))) for each in (x, weight))
    sums = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    for start in range(0, left.shape[1], 32):
        pairs = right[:, start : start + 32].reshape(-1, 16, 2).transpose(1, 0, 2).reshape(16, -1)
        sums = tile_product(sums, left[:, start : start + 32], pairs)
    return sums


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
    sums = torch.from_numpy(expected_sums(x, weight))
    return (sums if bias is None else sums + bias.float()).to(BF16).to(out)


@pytest.fixture(scope="module")
def code() -> EmulatedCode:
    """Kernels of all tests here, each compiled once."""
    return EmulatedCode(Tiles())


@pytest.fixture
def tiles(code: EmulatedCode, monkeypatch: pytest.MonkeyPatch) -> Tiles:
    """Replaces the tile instructions of all kernels that are made now."""
    code.tiles.begin()
    monkeypatch.setattr(cpu_kernels, "shared_code", lambda _: code)
    return code.tiles


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_every_number_have_the_bits_of_the_model(tiles: Tiles, shape: tuple[int, int]) -> None:
    """And nothing beyond x, the weight and the bias enters them."""
    weight, bias, x = randn(0, *shape), randn(1, shape[0]), randn(2, 40, shape[1])
    linear = CpuLinear(weight, amid_nan(bias), CpuKernels())
    linear.panels = amid_nan(linear.panels)
    wanted = expected(x, weight, bias, BF16)
    rng = random.Random(3)
    for rows in range(1, 41):
        start = rng.randrange(41 - rows)
        part = slice(start, start + rows)
        assert equal_bits(linear(amid_nan(x[part])), wanted[part]), rows
        assert tiles.faults == []
    assert tiles.released


def test_several_items_and_outputs(tiles: Tiles) -> None:
    """Within the bounds of a chain of sums in float32, too; without a bias; as floats."""
    weight, x = randn(0, 34, 70), randn(1, ROWS_AT_ONCE + 50, 70)
    linear = CpuLinear(weight, None, CpuKernels())
    found = linear(x, F32)
    assert equal_bits(found, expected(x, weight, None, F32))
    assert equal_bits(linear(x), found.to(BF16))
    assert tiles.faults == []
    exact, sizes = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    assert bool(((found.double() - exact).abs() <= 2**-8 * exact.abs() + 72 * 2**-23 * sizes).all())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", BLOCKS)
def test_blocks_of_many_rows(tiles: Tiles, shape: tuple[int, int, int]) -> None:
    rows, columns, inner = shape
    weight, bias, x = randn(0, columns, inner), randn(1, columns), randn(2, rows, inner)
    linear = CpuLinear(weight, amid_nan(bias), CpuKernels())
    linear.panels = amid_nan(linear.panels)
    found = linear(amid_nan(x), F32)
    some = [0, 31, 32, rows - 1]
    assert equal_bits(found[some], expected(x[some], weight, bias, F32))
    # The other rows: those of a batch that is not cut into blocks.
    for start in range(0, rows, 32):
        assert equal_bits(linear(x[start : start + 32], F32), found[start : start + 32])
    assert tiles.faults == []
    assert tiles.released


def test_tiles_of_rows_end_with_zeros() -> None:
    """Of 3 rows of 700 numbers: 22 steps in two chunks of 11, the last step of 28 numbers."""
    kernels, x = CpuKernels(), randn(0, 3, 700)
    arranged = torch.full((padded(3, 700)[0] * padded(3, 700)[1],), float("nan"), dtype=BF16)
    arguments = (x.data_ptr(), 700, arranged.data_ptr())
    kernels._launch(KernelLaunch(row_tiles(kernels.code), "rows", GROUP, 1, arguments), 3)
    wide = torch.nn.functional.pad(x, (0, 4, 0, 29)).view(32, 22, 32).transpose(0, 1)
    assert equal_bits(arranged, wide.flatten())


@pytest.mark.parametrize("rows", [1, 16, 17, 33])
def test_only_the_result_is_written(tiles: Tiles, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    kernels, memory = CpuKernels(), torch.full((rows * 45 + 256,), 7.0, dtype=BF16)
    new = kernels._new
    result = memory[128:-128].view(rows, 45)
    monkeypatch.setattr(kernels, "_new", lambda name, *rest: result if name == "linear_45" else new(name, *rest))
    weight, x = randn(0, 45, 77), randn(1, rows, 77)
    assert equal_bits(CpuLinear(weight, None, kernels)(x), expected(x, weight, None, BF16))
    assert bool((memory[:128] == 7.0).all() and (memory[-128:] == 7.0).all())
    assert tiles.faults == []


def test_one_row_goes_through_tiles(tiles: Tiles) -> None:
    """Two products, for the columns of a panel, in each of 3 steps of the inner dimension; 4 for more than 16 rows."""
    linear = CpuLinear(randn(0, 32, 96), None, CpuKernels())
    for rows, products in ((1, 6), (16, 6), (17, 12), (32, 12)):
        tiles.counts.clear()
        linear(randn(1, rows, 96))
        assert tiles.counts["tdpbf16ps"] == products
        assert tiles.counts["ldtilecfg"] == tiles.counts["tilerelease"] == 1


def test_floats_need_no_tiles(tiles: Tiles) -> None:
    CpuLinear(randn(0, 40, 33).float(), None, CpuKernels())(randn(1, 5, 33).float())
    assert not tiles.counts
    CpuLinear(randn(0, 40, 33), None, CpuKernels())(randn(1, 5, 33))
    assert tiles.counts


def test_the_order_of_sums_shows() -> None:
    """A chain of products one by one has other bits: the comparisons above would find it."""
    x, weight = randn(0, 4, 64), randn(1, 40, 64)
    chain = np.zeros((4, 40), np.float32)
    for k in range(64):
        chain = chain + x[:, k, None].float().numpy() * weight[None, :, k].float().numpy()
    assert not np.array_equal(expected_sums(x, weight), chain)


def test_faults_are_noted(tiles: Tiles) -> None:
    """What a processor would refuse: a product without a configuration."""
    tiles._callbacks["tdpbf16ps"](0, 4, 6)
    assert tiles.faults == ["tdpbf16ps(0, 4, 6): no configuration"]


@pytest.mark.skipif("amx" not in ISAS, reason="no AMX here")
@pytest.mark.parametrize("shape", BLOCKS)
def test_blocks_on_the_processor(shape: tuple[int, int, int]) -> None:
    rows, columns, inner = shape
    weight, x = randn(0, columns, inner), randn(1, rows, inner)
    linear = CpuLinear(weight, None, CpuKernels(num_threads=2, isa=ISAS["amx"]))
    found = linear(x, F32)
    assert equal_bits(found, expected(x, weight, None, F32))
    assert all(equal_bits(linear(x[row : row + 1], F32), found[row : row + 1]) for row in range(0, rows, 7))


@pytest.mark.skipif("amx" not in ISAS, reason="no AMX here")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_processor_has_the_bits_of_the_model(shape: tuple[int, int]) -> None:
    weight, x = randn(0, *shape), randn(1, 40, shape[1])
    linear = CpuLinear(weight, None, CpuKernels(isa=ISAS["amx"]))
    wanted = expected(x, weight, None, BF16)
    for rows in (1, 7, 16, 17, 40):
        assert equal_bits(linear(x[:rows]), wanted[:rows])
