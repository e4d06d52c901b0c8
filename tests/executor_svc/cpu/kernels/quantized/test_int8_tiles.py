"""Many rows in int8 through tiles (AMX): the kernels' own code on tile instructions in numpy, and on a processor."""

from __future__ import annotations

import pytest
import torch

from executor_svc.cpu.kernels import cpu_kernels
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.quantized.int8_codes import byte_kind
from executor_svc.cpu.kernels.quantized.launches import PackedWeightPart
from executor_svc.cpu.stored_linear import CpuStoredLinear
from executor_svc.device import int8_reference
from executor_svc.device.stored_linear import QuantFormat, StoredLinear
from tests.executor_svc.cpu.kernels.bits import equal_bits
from tests.executor_svc.cpu.kernels.emulated_tiles import EmulatedCode, Tiles
from tests.executor_svc.cpu.kernels.processors import ISAS
from tests.executor_svc.cpu.kernels.quantized.formats import FORMATS, INT8_ROWS, Q4_0, format_of, random_block
from tests.executor_svc.cpu.kernels.quantized.formats_in_memory import BlockRows
from tests.helpers.marks import short_and_long

WITH_MINIMUMS = QuantFormat("8 bits with minimums", 8, 32, offsets="minimum")
CASES = (
    *((name, False) for name in ("Q4_0", "Q4_K", "Q6_K", "Q8_0", "gptq 4", "mxfp4", INT8_ROWS, "8 bits")),
    *((name, False) for name in ("Q2_K", "Q3_K", "IQ4_NL")),
    *((name, True) for name in ("Q4_0", "gptq 4", INT8_ROWS, "int4 rows")),
)
"""Formats, and whether a row of x has one scale."""
SHORT = (
    *((name, False) for name in ("Q4_0", "Q4_K", "Q6_K", "gptq 4", INT8_ROWS, "8 bits")),
    *((name, True) for name in ("gptq 4", INT8_ROWS)),
)


class Rows(BlockRows):
    def __init__(self, kind: QuantFormat, rows: int, columns: int, whole_row: bool) -> None:
        self.block = random_block(kind, rows, columns, 5)
        super().__init__(kind, self.block)
        self.whole_row_activations = whole_row


def kind_of(name: str, columns: int) -> QuantFormat:
    return WITH_MINIMUMS if name == "8 bits" else format_of(name, columns)


def made(kernels: CpuKernels, rows: Rows) -> CpuStoredLinear:
    linear = CpuStoredLinear("test", StoredLinear([rows], torch.float32), None, kernels, "int8")
    linear.read()
    return linear


def tiled(linear: CpuStoredLinear) -> bool:
    (part,) = linear.parts
    return isinstance(part, PackedWeightPart) and part.int8 is not None and part.int8.tiled


def randn(rows: int, columns: int) -> torch.Tensor:
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(6))


def expected(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    numbers = int8_reference.quantize_rows(x.numpy(), rows.whole_row_activations)
    return torch.from_numpy(int8_reference.product(numbers, rows.block, rows.format))


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


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "whole_row"), short_and_long(CASES, SHORT))
def test_rows_have_the_bits_of_the_reference(tiles: Tiles, name: str, whole_row: bool) -> None:
    """Of whole and partial blocks of rows, panels and chunks of steps."""
    inner = 110 if "rows" in name else 256 * 3
    rows = Rows(kind_of(name, inner), 45, inner, whole_row)
    linear = made(CpuKernels(), rows)
    if not tiled(linear):
        pytest.skip("this processor's level has another form of rows")
    x = randn(31, inner)
    wanted = expected(x, rows)
    for count in (16, 31, 19):
        assert equal_bits(linear(x[:count]), wanted[:count])
        assert tiles.faults == []
        assert tiles.released
    assert sum(tiles.counts[each] for each in ("tdpbssd", "tdpbsud")) > 0


def test_few_rows_go_through_no_tiles(tiles: Tiles) -> None:
    """And the last rows, if there are few; a product has two tile products in each step and 16 rows of a panel."""
    linear = made(CpuKernels(), Rows(Q4_0, 64, 96, False))
    for count, blocks in ((1, 0), (15, 0), (16, 1), (23, 1), (24, 2), (32, 2), (97, 6)):
        tiles.counts.clear()
        linear(randn(count, 96))
        assert tiles.counts["tdpbssd"] == 2 * 2 * 3 * blocks, count
        assert tiles.counts["ldtilecfg"] == tiles.counts["tilerelease"] == (2 if blocks else 0)


def test_scales_and_row_scales_of_whole_rows_need_one_conversion(tiles: Tiles) -> None:
    """A tile product takes 64 columns there, and the totals are those of integers."""
    inner = 128
    linear = made(CpuKernels(), Rows(format_of(INT8_ROWS, inner), 32, inner, True))
    if not tiled(linear):
        pytest.skip("this processor's level has another form of rows")
    for count, blocks in ((8, 0), (9, 1), (16, 1), (32, 2)):
        tiles.counts.clear()
        linear(randn(count, inner))
        assert (tiles.counts["tdpbssd"], tiles.counts["tilestored64"]) == (4 * blocks, 2 * blocks)


def test_formats_whose_numbers_fit_bytes() -> None:
    kinds = {name: byte_kind(format_of(name, 256)) for name in FORMATS if not name.startswith("fp8")}
    assert kinds.pop("gptq 8") is None, "code - zero point has 9 bits"
    assert set(kinds.values()) == {"signed"}
    assert byte_kind(WITH_MINIMUMS) == "unsigned"
    assert byte_kind(QuantFormat("odd zero", 8, 32, zero=127)) is None


@pytest.mark.skipif("amx" not in ISAS, reason="no AMX here")
def test_the_processor_has_the_bits_of_the_reference() -> None:
    """Of what `test_int8` does not have: unsigned bytes, and rows of the weight longer than a chunk of steps."""
    kernels = CpuKernels(2, isa=ISAS["amx"])
    for kind, inner, whole_row in ((WITH_MINIMUMS, 1056, False), (format_of(INT8_ROWS, 1090), 1090, True)):
        rows = Rows(kind, 75, inner, whole_row)
        linear, x = made(kernels, rows), randn(130, inner)
        assert tiled(linear)
        wanted = expected(x, rows)
        for count in (16, 33, 130):
            assert equal_bits(linear(x[:count]), wanted[:count])
